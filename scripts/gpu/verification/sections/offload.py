"""Optimizer states and activations in pinned host memory: the same bits, what crosses as planned, and what it costs."""
from ..outcome import OutOfTime, require

CHECKS = "offload changes no bit; pinned bytes and bytes each way are the plan's; time beside runs without it"
SECONDS = 110

STEPS = 5
OPTIMIZER = ["--offload-optimizer", "pinned"]
# A slab for each part of a small model, or copies would never overlap.
SLABS = [*OPTIMIZER, "--set", "offload.slab_mib=1"]
OFFLOADS = {
    "optimizer": SLABS,
    "optimizer, at the end": [*SLABS, "--set", "offload.window=end"],
    "half of the optimizer": [*SLABS, "--set", "offload.fraction=0.5"],
    "activations": ["--offload-activations", "layernorm,mlp,attn_out"],
    "both": [*SLABS, "--offload-activations", "block_input", "--recompute", "full"],
}

# 65,536 tokens a step: there, states are to hide.
TIMED = ["--config", "qwen2.5-1.5b", "--seq", 1024, "--micro-batch", 8, "--accum", 8, "--dtype", "bf16", "--recompute", "full"]
FORMS = {"8-bit moments, bf16-split": ["--state-dtype", "8bit", "--master", "bf16-split"], "f32 moments and master": []}
TIMED_STEPS, WARMUP = 5, 2


def run(place, found):
    rows = found.table("Offload", "offloaded", "peak, bytes", "pinned, bytes", "to the device, bytes a step", "back, bytes a step", "same bits")
    for dtype in ("f32", "bf16"):
        model = ["--config", "llama-15m" if place.is_cuda else "tiny", "--accum", 3, "--steps", STEPS, "--dtype", dtype, "--state-dtype", "8bit"]
        resident, *offloaded = place.train_all([model, *([*model, *flags] for flags in OFFLOADS.values())])
        for name, trained in zip(["nothing", *OFFLOADS], [resident, *offloaded]):
            last = trained.metrics.steps[-1]
            same = "yes" if trained.metrics.bits() == resident.metrics.bits() else "NO"
            rows.append([f"{name}, {dtype}", *(f"{last[key]:,}" for key in ("peak_bytes", "host_pinned_bytes", "h2d_bytes", "d2h_bytes")), same])
        judge(dtype, resident, dict(zip(OFFLOADS, offloaded)))
    if place.is_cuda:
        time(place, found)


def judge(dtype, resident, offloaded):
    for name, trained in offloaded.items():
        require(trained.plan["host_pinned_bytes"] > 0, f"{name}, {dtype}: nothing is pinned")
        require(trained.plan["d2h_bytes"] > resident.plan["d2h_bytes"], f"{name}, {dtype}: nothing crosses")
        require(trained.metrics.bits() == resident.metrics.bits(), f"{name}, {dtype}: other bits than without offload")
        for key in ("peak_bytes", "host_pinned_bytes", "h2d_bytes", "d2h_bytes"):
            measured = {step[key] for step in trained.metrics.steps}
            require(measured == {trained.plan[key]}, f"{name}, {dtype}: {key} are {sorted(measured)}, planned {trained.plan[key]:,}")


def time(place, found):
    """Steps with and without offloaded states, in turn. Figures, no judgement: what hides depends on the machine."""
    rows = found.table("Time of offloaded optimizer states", "states", "step without, ms", "step with, ms", "slower by",
                       "crosses each way, bytes", "planned to be exposed, ms", "optimizer's share without, ms")
    rates = place.gpu()
    measured = [f"hardware.{key}={rates[key]:.1f}" for key in ("h2d_gbps", "d2h_gbps") if rates.get(key)]
    for name, states in FORMS.items():
        common = [*TIMED, *states, "--steps", TIMED_STEPS, *(word for one in measured for word in ("--set", one))]
        try:
            resident, offloaded = place.train(*common), place.train(*common, *OPTIMIZER)
        except OutOfTime:
            found.notes.append(f"{name}: no time; `verify offload` has more for it")
            continue
        without, with_ = (trained.metrics.median("step_ms", WARMUP) for trained in (resident, offloaded))
        planned = offloaded.plan["offload"]
        share = resident.metrics.steps[-1]["phase_ms"]["optimizer"]
        found.figures[name] = dict(without_ms=without, with_ms=with_, optimizer_ms=share, **planned)
        rows.append([name, f"{without:.1f}", f"{with_:.1f}", f"{100 * (with_ / without - 1):.1f} %", f"{planned['optimizer_bytes']:,}",
                     f"{planned['exposed_ms']:.1f}", f"{share:.1f}"])
        require(resident.metrics.bits() == offloaded.metrics.bits(), f"{name}: other bits than without offload")
