"""What it costs to have states, weights and gradients on the host or a disk: 8 layers of a model have its bytes and times a layer."""
from ..case import HOMES, crate, kernels
from ..outcome import Skipped, require

IS_SPEED = True

STEPS, WARMUP = 5, 2
PINNED = ["--offload-optimizer", "pinned"]
AWAY = ["--offload-parameters", "pinned", "--offload-gradients", "pinned"]
STATES_7B, ON_HOST, ON_DISK, NF4 = "states of 7B, 8 layers", "all of 8B, 8 layers, on the host", "states of 8B, 8 layers, on a disk", "NF4 of 8B, 8 layers, streamed"
EXACT = ["--dtype", "bf16", "--state-dtype", "8bit", "--master", "bf16-split", "--accum", 1, "--recompute", "full"]
SHAPE_7B = ["--config", "qwen2.5-7b", "--set", "model.layers=8", "--seq", 1024, "--micro-batch", 64, *EXACT]
SHAPE_8B = ["--config", "llama-3-8b", "--set", "model.layers=8", "--seq", 8192, "--micro-batch", 8, "--grad-dtype", "bf16", *EXACT]
SHAPE_NF4 = ["--config", "llama-3-8b", "--set", "model.layers=8", "--seq", 4096, "--micro-batch", 2, "--accum", 2, "--dtype", "bf16", "--lora", 16,
             "--base-dtype", "nf4"]
CASES = {STATES_7B: 60, ON_HOST: 45, ON_DISK: 60, NF4: 30}
# What is required on a GPU: by how much of a step's time these forms may be slower, and the share of the rate of copies that `doctor` measures.
SLOWER_MAX, RATE_MIN = 0.03, 0.9
BOUNDED = {STATES_7B: "forward window", ON_HOST: "pinned"}


def sources(case):
    more = {NF4: kernels("dequantise"), ON_DISK: crate("optim", "disk"), ON_HOST: crate("session", "copies")}
    return (*HOMES, *more.get(case, ()))


def forms(place, case):
    """The shape, and the forms that are run beside the first."""
    if case == STATES_7B:
        return SHAPE_7B, {"resident": [], "forward window": PINNED, "at the end": [*PINNED, "--set", "offload.window=end"]}
    if case == ON_HOST:
        return SHAPE_8B, {"resident": [], "pinned": [*AWAY, *PINNED]}
    if case == ON_DISK:
        return SHAPE_8B, {"resident": [], "disk": [*AWAY, "--offload-optimizer", place.file("states")]}
    return SHAPE_NF4, {"resident": [], "streamed": ["--offload-parameters", "pinned"]}


def run(place, found, case):
    shape, runs = forms(place, case)
    rates = place.gpu() if place.is_gpu else {}
    measured = [word for key in ("h2d_gbps", "d2h_gbps") if rates.get(key) for word in ("--set", f"hardware.{key}={rates[key]:.1f}")]
    rows = found.table("Homes", "run", "form", "step, ms", "slower by", "each way, bytes", "planned to be exposed, ms", "copies both ways, GB/s", "SM clock, MHz")
    first = None
    for name, more in runs.items():
        flags = place.sized(*shape, *more, *(measured if more else []))
        require_room(place, name, flags)
        trained, watch = place.train_watched(*flags, "--steps", STEPS)
        first = first or trained
        planned, ms = trained.plan.get("offload") or {}, trained.metrics.median("step_ms", WARMUP)
        slower = ms / first.metrics.median("step_ms", WARMUP) - 1
        # All copies of states at the step's end: their rate.
        rate = 2 * planned["optimizer_bytes"] / trained.metrics.steps[-2]["phase_ms"]["optimizer"] / 1e6 if planned and name == "at the end" else None
        rows.append([case, name, f"{ms:.1f}", f"{100 * slower:.1f} %", f"{planned.get('optimizer_bytes', 0):,}", f"{planned.get('exposed_ms', 0):.1f}",
                     "-" if rate is None else f"{rate:.1f}{share_of_rate(rate, rates.get('both_ways_gbps'))}", watch.sm_mhz])
        found.figures.update({f"{name}, ms": ms, **({f"{name}, slower": slower} if more else {})})
        require(trained.metrics.bits() == first.metrics.bits(), f"{case}, {name}: other bits than with everything on the GPU")
        if rate and rates.get("both_ways_gbps"):
            found.figures["share of copies' rate"] = rate / rates["both_ways_gbps"]
        require(trained.metrics.peaks() == {trained.plan["peak_bytes"]}, f"{case}, {name}: a peak is not the planned one")
    if place.is_gpu:
        judge(case, found.figures)


def share_of_rate(both_ways, of_doctor):
    return f", {100 * both_ways / of_doctor:.0f} % of {of_doctor:.1f}" if of_doctor else ""


def judge(case, figures):
    """Shares are judged when all forms have run, so that none is without its times."""
    slower = figures.get(f"{BOUNDED.get(case)}, slower", 0.0)
    require(slower <= SLOWER_MAX, f"{case}, {BOUNDED.get(case)}: {100 * slower:.1f} % slower than with everything on the GPU, {100 * SLOWER_MAX:.0f} % are allowed")
    share = figures.get("share of copies' rate", 1.0)
    require(share >= RATE_MIN, f"{case}: copies have {100 * share:.0f} % of the rate that `doctor` measured, {100 * RATE_MIN:.0f} % are required")


def require_room(place, name, flags):
    """A machine that is too small is no failure."""
    if place.is_gpu:
        lack = obstacle_to(place.plan(*flags), place.gpu()["memory"]["total"], place.doctor["host"])
        if lack:
            raise Skipped(f"{name}: {lack}")


def obstacle_to(plan, total, host):
    """What GPU or host lack for a plan."""
    needed = plan["reserved_bytes"] + plan["device_overhead_bytes"]
    if needed > total:
        return f"it needs {needed:,} bytes of the GPU's {total:,}"
    limits = [host[key] for key in ("available_bytes", "group_limit_bytes", "locked_limit_bytes")]
    room = min((limit for limit in limits if limit is not None), default=float("inf"))
    # Leave some memory to the rest of the process.
    if 1.2 * plan["host_pinned_bytes"] > room:
        return f"it pins {plan['host_pinned_bytes']:,} bytes, and the host has room for {room:,}"
    return None
