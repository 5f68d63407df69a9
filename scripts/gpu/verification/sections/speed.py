"""Speed and memory of each strategy beside PyTorch and transformers, in turn, on the same tokens in the same shapes, with clocks."""
import json
import tomllib
from dataclasses import dataclass

from ..case import PASSES, STEP
from ..commands import run as run_command
from ..gpu import Watch
from ..outcome import Failed, OutOfTime, Skipped, require

IS_SPEED = True

# The first losses of both must differ by less, or they do not train the same model: weights are drawn from the same
# distribution.
LOSS_NEAR = 0.1
OURS, EAGER, COMPILED, TRANSFORMERS = "trainer", "torch", "torch.compile", "transformers"
BYTES_8 = ("--state-dtype", "8bit", "--grad-dtype", "bf16", "--master", "bf16-split")


@dataclass
class Shape:
    """A model, its shape, and what is run in turn. Without `ours`, weights have f32 masters and moments on both sides."""
    config: str
    seq: int
    micro_batch: int
    recompute: str = "none"
    engines: tuple = (OURS, EAGER, COMPILED)
    seconds: int = 60
    steps: int = 10
    warmup: int = 4
    ours: tuple = ()
    torch: tuple = ("--master",)

EVERY = (OURS, TRANSFORMERS, EAGER, COMPILED)
SHAPES = {
    "Llama-3.2 1B, 2 x 4,096": Shape("llama-3.2-1b", 4096, 2, engines=EVERY, seconds=80),
    "Qwen2.5-1.5B, 8 x 1,024": Shape("qwen2.5-1.5b", 1024, 8, engines=EVERY, seconds=80),
    "Qwen2.5-0.5B, 8 x 1,024": Shape("qwen2.5-0.5b", 1024, 8),
    "Qwen2.5-1.5B, all recomputed": Shape("qwen2.5-1.5b", 1024, 8, "full", seconds=80),
    "Qwen2.5-0.5B, all recomputed": Shape("qwen2.5-0.5b", 1024, 8, "full"),
    "Llama-3.2 1B, all recomputed": Shape("llama-3.2-1b", 4096, 2, "full", seconds=80),
    "Qwen2.5-0.5B, mlp recomputed": Shape("qwen2.5-0.5b", 1024, 8, "mlp", (OURS, EAGER), 40),
    "Qwen2.5-0.5B, core_attn recomputed": Shape("qwen2.5-0.5b", 1024, 8, "core_attn", (OURS, EAGER), 40),
    "Qwen2.5-7B, 8 bytes a parameter": Shape("qwen2.5-7b", 1024, 4, "full", (OURS, EAGER), 100, 7, 3, BYTES_8, ()),
}
CASES = {name: shape.seconds for name, shape in SHAPES.items()}
# For the logic alone: f32 on both sides.
DRY = dict(config="tiny", seq=128, micro_batch=4, steps=6, warmup=2, torch=())


def sources(_case):
    return (*STEP, *PASSES)


def run(place, found, case):
    shape = SHAPES[case]
    if not place.is_gpu:
        place.plan(*flags_of(shape), device="cuda")
        # transformers and torch.compile take longer there than all of the rest.
        shape = Shape(**{**vars(shape), **DRY, "engines": (OURS, EAGER)})
    rows = found.table("Speed and memory", "model", "tokens a step", "recompute", "by", "tokens/s", "of peak", "step, ms", "peak, bytes",
                       "reserved, bytes", "SM clock, MHz", "watts", "trainer is faster by")
    outcomes, start = {}, place.clock.left()
    for engine in shape.engines:
        outcomes[engine] = attempt(place, shape, engine)
        rows.append(row(place, case, shape, engine, outcomes))
        if isinstance(outcomes[engine], Exception):
            found.notes.append(f"{engine}: {outcomes[engine]}")
    # Once more in turn where there is time, since clocks drift.
    if place.is_gpu and place.clock.left() > 1.1 * (start - place.clock.left()):
        again = {engine: attempt(place, shape, engine) for engine, outcome in outcomes.items() if isinstance(outcome, dict)}
        rows.extend(row(place, case, shape, engine, again, ", again") for engine in again)
        outcomes |= {engine: mean(outcomes[engine], outcome) for engine, outcome in again.items() if isinstance(outcome, dict)}
    for engine, outcome in outcomes.items():
        if isinstance(outcome, dict):
            found.figures.update({f"{engine}, tokens/s": outcome["tokens_per_s"], f"{engine}, MHz": outcome["sm_mhz"]})
    judge(outcomes)


def mean(first, second):
    """The figures of the first run, with times and clocks that are the mean of both."""
    means = {key: (first[key] + second[key]) / 2 for key in ("tokens_per_s", "step_ms", "sm_mhz", "watts") if None not in (first[key], second[key])}
    return first | means


def attempt(place, shape, engine):
    """The figures of a run, or why there are none."""
    try:
        with Watch() as watch:
            figures = ours(place, shape) if engine == OURS else peer(place, shape, engine)
        return {**figures, **watch.figures()}
    except (Failed, OutOfTime, Skipped) as ended:
        return ended


def flags_of(shape):
    return ["--config", shape.config, "--seq", shape.seq, "--micro-batch", shape.micro_batch, "--accum", 1, "--recompute", shape.recompute, *shape.ours]


def ours(place, shape):
    dtype = "bf16" if place.is_gpu else "f32"
    data = ["--data", place.prepared("tokens.bin"), "--no-shuffle"] if place.is_gpu else []
    trained = place.train(*flags_of(shape), "--dtype", dtype, *data, "--steps", shape.steps, "--lr", "1e-4")
    metrics, planned = trained.metrics, trained.plan["peak_bytes"]
    require(metrics.peaks() == {planned}, f"{planned:,} bytes were planned, the peaks are {metrics.peaks()}")
    return dict(tokens_per_s=metrics.median("tokens_per_s", shape.warmup), step_ms=metrics.median("step_ms", shape.warmup),
                first_loss=metrics.steps[0]["loss"], peak_bytes=planned, reserved_bytes=metrics.steps[-1].get("device_reserved_high_bytes"),
                flops_per_token=metrics.header["flops_per_token"])


def peer(place, shape, engine):
    model = tomllib.loads((place.bundle / "configs" / f"{shape.config}.toml").read_text())["model"]
    sizes = [word for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "norm_eps", "rope_theta", "init_std")
             for word in (f"--{name.replace('_', '-')}", model[name])]
    flags = [f"--{flag}" for flag, key in (("tie", "tie_embeddings"), ("qkv-bias", "qkv_bias")) if model.get(key)]
    more = {COMPILED: ["--compile", "blocks"], TRANSFORMERS: ["--transformers"]}.get(engine, [])
    tokens = ["--tokens", place.prepared("tokens.bin")] if place.is_gpu else []
    command = [*place.peer, place.bundle / "peers" / "torch_llama.py", *sizes, *flags, *more, *shape.torch, *tokens, "--device", "cuda" if place.is_gpu else "cpu",
               "--seq", shape.seq, "--micro-batch", shape.micro_batch, "--accum", 1, "--steps", shape.steps, "--warmup", shape.warmup, "--lr", "1e-4",
               "--recompute", shape.recompute]
    finished = run_command(command, place.clock, place.peer_environment)
    require(finished.code == 0, finished.complaint())
    said = json.loads(finished.stdout.splitlines()[-1])
    return dict(tokens_per_s=said["tokens_per_s"], step_ms=1e3 * said["step_s"], first_loss=said["loss"][0],
                peak_bytes=said.get("peak_allocated_bytes"), reserved_bytes=said.get("peak_reserved_bytes"))


def row(place, case, shape, engine, outcomes, which=""):
    start, outcome = [case, f"{shape.micro_batch} x {shape.seq}", shape.recompute, engine + which], outcomes[engine]
    if not isinstance(outcome, dict):
        return [*start, "no time" if isinstance(outcome, OutOfTime) else "failed", *["-"] * 7]
    own, peak = outcomes.get(OURS), place.gpu().get("peak_tflops")
    own = own if isinstance(own, dict) else None
    ratio = f"{own['tokens_per_s'] / outcome['tokens_per_s']:.2f}" if own and engine != OURS else "-"
    # By the same count of operations on both sides.
    share = f"{100 * outcome['tokens_per_s'] * own['flops_per_token'] / (peak * 1e12):.1f} %" if peak and own else "-"
    number = lambda value: "-" if value is None else f"{value:,.0f}"
    return [*start, number(outcome["tokens_per_s"]), share, f"{outcome['step_ms']:.1f}", number(outcome["peak_bytes"]), number(outcome["reserved_bytes"]),
            number(outcome["sm_mhz"]), number(outcome["watts"]), ratio]


def judge(outcomes):
    own = outcomes[OURS]
    if not isinstance(own, dict):
        raise own
    peers = {engine: outcome for engine, outcome in outcomes.items() if engine != OURS}
    for engine, figures in peers.items():
        if isinstance(figures, dict):
            near = abs(own["first_loss"] - figures["first_loss"]) < LOSS_NEAR
            require(near, f"the first losses are {own['first_loss']} and, by {engine}, {figures['first_loss']}: not the same model")
    late = next((outcome for outcome in peers.values() if isinstance(outcome, OutOfTime)), None)
    if late:
        raise late
    if peers and not any(isinstance(outcome, dict) for outcome in peers.values()):
        raise Skipped(f"no peer ran (--python names another PyTorch); only the trainer was measured: {next(iter(peers.values()))}")
