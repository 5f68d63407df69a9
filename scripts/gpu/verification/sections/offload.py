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

# 65,536 tokens in one micro-batch, whose forward pass is what states hide behind.
TIMED = ["--seq", 1024, "--micro-batch", 64, "--accum", 1, "--dtype", "bf16", "--recompute", "full"]
# Each form is timed at the first shape that fits and leaves so many seconds for its three runs.
SHAPES = {"qwen2.5-7b": 420, "qwen2.5-1.5b": 60}
FORMS = {"8-bit moments, bf16-split": ["--state-dtype", "8bit", "--master", "bf16-split"], "f32 moments and master": []}
TIMED_STEPS, WARMUP = 3, 1
# Shares that were asked for: of a step's time with 8-bit moments at the larger shape, and of the rate of copies that `doctor` measures.
SLOWER_MAX, RATE_MIN = 0.03, 0.9


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
    """Steps without offloaded states, with them, and with all copies at the step's end, which shows their rate. Figures, no judgement:
    what hides depends on the machine."""
    rows = found.table("Time of offloaded optimizer states", "states", "shape", "step without, ms", "step with, ms",
                       f"slower by (asked of 8-bit moments at 7B: {100 * SLOWER_MAX:.0f} %)", "crosses each way, bytes", "planned to be exposed, ms",
                       "optimizer's share without, ms", f"copies at the end, both ways (asked: {100 * RATE_MIN:.0f} % of doctor's)")
    rates = place.gpu()
    measured = [f"hardware.{key}={rates[key]:.1f}" for key in ("h2d_gbps", "d2h_gbps") if rates.get(key)]
    for name, states in FORMS.items():
        flags = [*TIMED, *states, "--steps", TIMED_STEPS, *(word for one in measured for word in ("--set", one))]
        try:
            shape = first_that_fits(place, found, name, flags)
            if shape is None:
                continue
            commands = ([], OPTIMIZER, [*OPTIMIZER, "--set", "offload.window=end"])
            resident, offloaded, at_end = (place.train("--config", shape, *flags, *more) for more in commands)
        except OutOfTime:
            found.notes.append(f"{name}: no time; `verify offload --budget-s 1200` has more for it")
            continue
        figures = figures_of(resident, offloaded, at_end)
        share = share_of_rate(figures["measured_both_ways_gbps"], rates.get("both_ways_gbps"))
        found.figures[name] = dict(shape=shape, **figures)
        rows.append([name, shape, f"{figures['without_ms']:.1f}", f"{figures['with_ms']:.1f}", f"{100 * figures['slower']:.1f} %",
                     f"{figures['optimizer_bytes']:,}", f"{figures['exposed_ms']:.1f}", f"{figures['optimizer_ms']:.1f}",
                     f"{figures['measured_both_ways_gbps']:.1f} GB/s{share}"])
        for trained in (offloaded, at_end):
            require(resident.metrics.bits() == trained.metrics.bits(), f"{name}: other bits than without offload")


def first_that_fits(place, found, name, flags):
    """The first shape that fits the GPU, the host and the time left, or none; and a note for every shape that does not."""
    for shape, seconds in SHAPES.items():
        obstacle = obstacle_to(place, place.plan("--config", shape, *flags), place.plan("--config", shape, *flags, *OPTIMIZER), seconds)
        if obstacle is None:
            return shape
        found.notes.append(f"{name}: not at {shape}: {obstacle}")
    return None


def obstacle_to(place, resident, offloaded, seconds):
    """What a shape lacks, by its plans without and with offload."""
    needed, total = resident["reserved_bytes"] + resident["device_overhead_bytes"], place.gpu()["memory"]["total"]
    if needed > total:
        return f"it needs {needed:,} bytes of the GPU's {total:,}"
    limits = [place.doctor["host"][key] for key in ("available_bytes", "group_limit_bytes", "locked_limit_bytes")]
    room = min((limit for limit in limits if limit is not None), default=float("inf"))
    # Leave some memory to the rest of the process.
    if 1.2 * offloaded["host_pinned_bytes"] > room:
        return f"it pins {offloaded['host_pinned_bytes']:,} bytes, and the host has room for {room:,}"
    if place.clock.left() < seconds:
        return f"{place.clock.left():.0f} s are left, and it takes {seconds}; `verify offload --budget-s 1200` has more"
    return None


def figures_of(resident, offloaded, at_end):
    without, with_ = (trained.metrics.median("step_ms", WARMUP) for trained in (resident, offloaded))
    planned = offloaded.plan["offload"]
    optimizer_ms = lambda trained: trained.metrics.steps[-1]["phase_ms"]["optimizer"]
    # The update itself takes a fraction of that, beside the copies. The plan has a rate of its own, from `doctor`'s.
    measured = 2 * planned["optimizer_bytes"] / optimizer_ms(at_end) / 1e6
    return dict(without_ms=without, with_ms=with_, slower=with_ / without - 1, optimizer_ms=optimizer_ms(resident),
                at_end_ms=optimizer_ms(at_end), measured_both_ways_gbps=measured, **planned)


def share_of_rate(both_ways, of_doctor):
    return f", {100 * both_ways / of_doctor:.0f} % of {of_doctor:.1f}" if of_doctor else ""
