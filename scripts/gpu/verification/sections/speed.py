"""Speed and memory of each strategy beside PyTorch, in turn, on the same tokens in the same shapes."""
import json
import tomllib
from dataclasses import dataclass, field

from ..commands import run as run_command
from ..outcome import Failed, OutOfTime, Skipped, require
from ..tensors import write_tokens

CHECKS = "tokens/s, utilisation and peak bytes of each strategy beside PyTorch (SDPA, fused AdamW), with and without torch.compile"
SECONDS = 270

# The most that one run may take: compiling a large model takes most of a minute.
RUN_SECONDS = 150
# The first losses of both must differ by less, or they do not train the same model: weights are drawn from the same
# distribution.
LOSS_NEAR = 0.1

OURS, EAGER, COMPILED = "trainer", "torch", "torch.compile"


@dataclass
class Case:
    """A model, its shape, and what is run in turn. Without `ours`, weights have f32 masters and moments on both sides."""
    config: str
    seq: int
    micro_batch: int
    recompute: str
    engines: tuple
    steps: int = 12
    warmup: int = 4
    ours: list = field(default_factory=list)
    torch: list = field(default_factory=lambda: ["--master"])
    note: str = ""


SMALLEST = ("qwen2.5-0.5b", 1024, 8)
MIDDLE = ("qwen2.5-1.5b", 1024, 8)
LONG = ("llama-3.2-1b", 4096, 2)
BYTES_8 = ["--state-dtype", "8bit", "--grad-dtype", "bf16", "--master", "bf16-split"]
EVERY = (OURS, EAGER, COMPILED)

# All of them, or the section has had no time.
ON_CUDA = [Case(*SMALLEST, "none", (OURS, EAGER)), Case(*MIDDLE, "none", EVERY), Case(*SMALLEST, "full", (OURS, EAGER))]
# As far as time goes, the most important first. PyTorch's checkpoint has nothing for norms and products alone.
MORE_ON_CUDA = [
    Case(*LONG, "none", EVERY), Case(*SMALLEST, "none", (OURS, COMPILED)), Case(*SMALLEST, "full", (OURS, COMPILED)),
    Case(*SMALLEST, "mlp", (OURS, EAGER)), Case(*SMALLEST, "core_attn", (OURS, EAGER)),
    Case(*SMALLEST, "core_attn,layernorm,mlp_act", (OURS,)), Case(*MIDDLE, "full", EVERY),
    Case(*MIDDLE, "none", (COMPILED,), torch=[], note="bf16 states"), Case(*LONG, "full", EVERY),
    Case("qwen2.5-7b", 1024, 4, "full", (OURS, EAGER), steps=7, warmup=3, ours=BYTES_8, torch=[], note="8 bytes a parameter"),
]
# For the logic alone: f32 on both sides.
ON_CPU = [Case("tiny", 128, 4, mode, (OURS, EAGER), steps=6, warmup=2, torch=[]) for mode in ("none", "full")]


def run(place, found):
    measure(place, found, ON_CUDA if place.is_cuda else ON_CPU, are_essential=True)


def measure(place, found, cases, are_essential):
    """Figures of these cases; without time for some of the essential ones there was no time."""
    rows = found.table("Speed and memory", "model", "tokens a step", "recompute", "by", "tokens/s", "of peak", "step, ms",
                       "peak, bytes", "reserved, bytes", "trainer is faster by")
    version = torch_version(place)
    found.figures.update(torch=version, peak_tflops=place.gpu().get("peak_tflops"), runs=[])
    runs = [(case, engine) for case in cases for engine in case.engines if engine == OURS or version]
    outcomes = {}
    for case, engine in runs:
        outcome = attempt(place, case, engine)
        outcomes[key(case, engine)] = outcome
        if isinstance(outcome, dict):
            found.figures["runs"].append(dict(model=case.config, seq=case.seq, micro_batch=case.micro_batch, by=engine,
                                              recompute=case.recompute, note=case.note, **outcome))
        elif isinstance(outcome, Failed):
            found.notes.append(f"{engine}, {case.config}, {case.recompute}: {outcome}")
        rows.append(row(place, case, engine, outcome, outcomes))
    late = sum(isinstance(outcome, OutOfTime) for outcome in outcomes.values())
    if late:
        found.notes.append(f"{late} of {len(runs)} runs had no time; the section by itself has more for them")
    judge(runs if are_essential else [], outcomes, version)


def key(case, engine):
    return case.config, case.recompute, engine, case.note


def own(case, outcomes):
    """Our run of the same case, or of the one that it varies; none if it has no figures."""
    candidates = [outcomes.get((case.config, case.recompute, OURS, note)) for note in (case.note, "")]
    return next((outcome for outcome in candidates if isinstance(outcome, dict)), None)


def attempt(place, case, engine):
    """The figures of a run, or why there are none: Failed, OutOfTime, or Skipped where the GPU is too small."""
    clock = place.clock.within(RUN_SECONDS)
    if clock.left() < 20:
        return OutOfTime("no time")
    whole, place.clock = place.clock, clock
    try:
        require_room(place, case)
        return ours(place, case) if engine == OURS else peer(place, case, engine)
    except (Failed, OutOfTime, Skipped) as ended:
        return ended
    finally:
        place.clock = whole


def require_room(place, case):
    total = place.gpu().get("memory", {}).get("total")
    if not total:
        return
    plan = place.plan(*shape(place, case))
    needed = plan["reserved_bytes"] + plan["device_overhead_bytes"]
    if needed > total:
        raise Skipped(f"{needed:,} bytes do not fit {total:,}")


def shape(place, case):
    """The settings that decide the memory of our run."""
    return ["--config", case.config, "--seq", case.seq, "--micro-batch", case.micro_batch, "--accum", 1, "--dtype",
            "bf16" if place.is_cuda else "f32", "--recompute", case.recompute, *case.ours]


def tokens_file(place, case, vocab):
    """The same random tokens for everyone: as many as the steps read."""
    count = case.seq * case.micro_batch * case.steps + 1
    path = place.file(f"tokens-{vocab}-{count}.bin")
    if not path.exists():
        write_tokens(path, vocab, count)
    return path


def model_of(place, case):
    return tomllib.loads((place.bundle / "configs" / f"{case.config}.toml").read_text())["model"]


def ours(place, case):
    tokens = tokens_file(place, case, model_of(place, case)["vocab"])
    trained = place.train(*shape(place, case), "--data", tokens, "--no-shuffle", "--steps", case.steps, "--lr", "1e-4")
    metrics = trained.metrics
    planned = trained.plan["peak_bytes"]
    require(metrics.peaks() == {planned}, f"{case.config}, {case.recompute}: {planned:,} bytes were planned, the peaks are {metrics.peaks()}")
    last = metrics.steps[-1]
    return dict(tokens_per_s=metrics.median("tokens_per_s", case.warmup), step_ms=metrics.median("step_ms", case.warmup),
                first_loss=metrics.steps[0]["loss"], peak_bytes=planned, reserved_bytes=last.get("device_reserved_high_bytes"),
                device_used_bytes=last.get("device_total_used_bytes"), flops_per_token=metrics.header["flops_per_token"])


def peer(place, case, engine):
    model = model_of(place, case)
    sizes = [word for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "norm_eps", "rope_theta", "init_std")
             for word in (f"--{name.replace('_', '-')}", model[name])]
    flags = [f"--{flag}" for flag, key in (("tie", "tie_embeddings"), ("qkv-bias", "qkv_bias")) if model.get(key)]
    compiled = ["--compile", "blocks"] if engine == COMPILED else []
    tokens = tokens_file(place, case, model["vocab"])
    command = [*place.peer, place.bundle / "peers" / "torch_llama.py", *sizes, *flags, *compiled, *(case.torch if place.is_cuda else []),
               "--device", place.device, "--tokens", tokens, "--seq", case.seq, "--micro-batch", case.micro_batch, "--accum", 1,
               "--steps", case.steps, "--warmup", case.warmup, "--lr", "1e-4", "--recompute", case.recompute]
    finished = run_command(command, place.clock, place.peer_environment)
    require(finished.code == 0, finished.complaint())
    said = json.loads(finished.stdout.splitlines()[-1])
    return dict(tokens_per_s=said["tokens_per_s"], step_ms=1e3 * said["step_s"], first_loss=said["loss"][0],
                peak_bytes=said.get("peak_allocated_bytes"), reserved_bytes=said.get("peak_reserved_bytes"), params=said["params"])


def torch_version(place):
    """PyTorch's version where it has this device; none where there is no PyTorch."""
    code = "import torch; print(torch.__version__ if {} else '')".format("torch.cuda.is_available()" if place.is_cuda else True)
    try:
        finished = run_command([*place.peer, "-c", code], place.clock, place.peer_environment)
    except OSError:
        return None
    return finished.stdout.strip() or None


def row(place, case, engine, outcome, outcomes):
    title = f"{engine}, {case.note}" if case.note else engine
    start = [case.config, f"{case.micro_batch} x {case.seq}", case.recompute, title]
    if not isinstance(outcome, dict):
        why = {OutOfTime: "no time", Skipped: "does not fit"}.get(type(outcome), "failed")
        return [*start, why, *["-"] * 5]
    ours_, peak = own(case, outcomes), place.gpu().get("peak_tflops")
    ratio = f"{ours_['tokens_per_s'] / outcome['tokens_per_s']:.2f}" if ours_ and engine != OURS else "-"
    # By the same count of operations on both sides.
    share = f"{100 * outcome['tokens_per_s'] * ours_['flops_per_token'] / (peak * 1e12):.1f} %" if peak and ours_ else "-"
    number = lambda value: "-" if value is None else f"{value:,.0f}"
    return [*start, number(outcome["tokens_per_s"]), share, f"{outcome['step_ms']:.1f}", number(outcome["peak_bytes"]),
            number(outcome["reserved_bytes"]), ratio]


def judge(essential, outcomes, version):
    mistakes = [f"{config}, {recompute}: {outcome}" for (config, recompute, engine, _), outcome in outcomes.items()
                if engine == OURS and isinstance(outcome, Failed)]
    more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    require(not mistakes, f"{mistakes and mistakes[0]}{more}")
    for (config, recompute, engine, note), figures in outcomes.items():
        ours_ = own(Case(config, 0, 0, recompute, (), note=note), outcomes)
        if isinstance(figures, dict) and ours_:
            near = abs(ours_["first_loss"] - figures["first_loss"]) < LOSS_NEAR
            require(near, f"{config}, {recompute}: the first losses are {ours_['first_loss']} and, by {engine}, {figures['first_loss']}: "
                          "not the same model")
    late = [f"{case.config}, {case.recompute}, {engine}" for case, engine in essential if isinstance(outcomes[key(case, engine)], OutOfTime)]
    if late:
        raise OutOfTime(f"{len(late)} of {len(essential)} runs that matter most, from {late[0]} on")
    if version is None:
        raise Skipped("there is no PyTorch for this device (--python names another one): only the trainer was measured")
    for engine in (EAGER, COMPILED):
        named = [outcomes[key(case, other)] for case, other in essential if other == engine]
        require(not named or any(isinstance(outcome, (dict, Skipped)) for outcome in named), f"no run of {engine} ended well: {named and named[0]}")
