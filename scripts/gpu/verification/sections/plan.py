"""The plan against what the ledger, the driver's pool and the driver say."""
from ..case import ATTENTION, MEMORY
from ..outcome import require

STEPS = 4

SMALL = ["--config", "llama-15m", "--accum", 2]
LARGE = ["--config", "qwen2.5-0.5b", "--seq", 1024, "--micro-batch", 4, "--accum", 2, "--dtype", "bf16"]
LONG = "4 layers of Llama-3 8B, 262,144 tokens"
FLAGS = {
    "llama-15m, f32": [*SMALL, "--dtype", "f32", "--attention", "eager", "--recompute", "none"],
    "llama-15m, 8 bits": [*SMALL, "--dtype", "bf16", "--recompute", "core_attn,mlp", "--state-dtype", "8bit", "--grad-dtype", "bf16", "--master", "bf16-split"],
    "Qwen2.5-0.5B": [*LARGE, "--recompute", "none"],
    "Qwen2.5-0.5B, all recomputed": [*LARGE, "--recompute", "full"],
    # A step takes most of a minute; the other cases show that later ones allocate nothing.
    LONG: ["--config", "llama-3-8b", "--set", "model.layers=4", "--seq", 262144, "--micro-batch", 1, "--accum", 1, "--dtype", "bf16",
           "--recompute", "full", "--steps", 1],
}
CASES = {"llama-15m, f32": 10, "llama-15m, 8 bits": 10, "Qwen2.5-0.5B": 20, "Qwen2.5-0.5B, all recomputed": 20, LONG: 60}


def sources(case):
    return ATTENTION if case == LONG else MEMORY


def run(place, found, case):
    rows = found.table("Plan and device, bytes", "run", "planned peak", "measured peak", "plan reserves", "pool used", "difference",
                       "pool reserved", "overhead", "planned overhead", "driver allocations from step 2")
    arguments = [*(FLAGS[case] if place.is_gpu else place.sized(*FLAGS[case])), *([] if case == LONG else ["--steps", STEPS])]
    data = ["--data", place.prepared("tokens.bin"), "--no-shuffle"] if case == LONG and place.is_gpu else []
    # The plan first, by a command that never sees the device.
    ahead = place.plan(*arguments, *data)
    trained = place.train(*arguments, *data)
    figures = compare(trained.plan, trained.metrics, place.is_cuda)
    found.figures.update(step_ms=trained.metrics.median("step_ms", 0 if case == LONG else 1), **figures)
    numbers = [figures.get(key) for key in ("planned_peak_bytes", "peak_bytes", "reserved_bytes", "device_used_high_bytes",
                                            "difference_bytes", "device_reserved_high_bytes", "overhead_bytes",
                                            "planned_overhead_bytes", "driver_allocations")]
    rows.append([case, *("-" if number is None else f"{number:,}" for number in numbers)])
    judge(case, figures)
    require(ahead["peak_bytes"] == trained.plan["peak_bytes"], f"{case}: `trainer plan` says {ahead['peak_bytes']:,} bytes, the "
                                                               f"run's plan {trained.plan['peak_bytes']:,}")


def compare(plan, metrics, is_cuda):
    """The figures of a run: peaks as sets over its steps, marks of the device from step 2 on, or of the only step, which may allocate."""
    figures = dict(planned_peak_bytes=plan["peak_bytes"], peak_bytes=max(metrics.peaks()), reserved_bytes=plan["reserved_bytes"],
                   peaks=sorted(metrics.peaks() | {step["planned_peak_bytes"] for step in metrics.steps}),
                   slabs=sorted({step["slab_bytes"] for step in metrics.steps} | {plan["slab_bytes"]}))
    if is_cuda:
        later = metrics.steps[1:] or metrics.steps[-1:]
        overheads = [step["device_total_used_bytes"] - step["device_reserved_high_bytes"] for step in later]
        differences = [step["device_used_high_bytes"] - plan["reserved_bytes"] for step in later]
        figures.update(
            device_used_high_bytes=max(step["device_used_high_bytes"] for step in later),
            device_reserved_high_bytes=max(step["device_reserved_high_bytes"] for step in later),
            differences=sorted(set(differences)), difference_bytes=max(differences),
            overhead_bytes=max(overheads), planned_overhead_bytes=plan["device_overhead_bytes"],
            driver_allocations=max((step["driver_allocations"] for step in metrics.steps[1:]), default=0),
            h2d_bytes=sorted({step["h2d_bytes"] for step in later}), d2h_bytes=sorted({step["d2h_bytes"] for step in later}))
    return figures


def judge(name, figures):
    require(figures["peaks"] == [figures["planned_peak_bytes"]], f"{name}: planned {figures['planned_peak_bytes']:,} bytes; planned and "
                                                                 f"measured over the steps: {figures['peaks']}")
    require(len(figures["slabs"]) == 1, f"{name}: planned and measured slabs are {figures['slabs']}")
    if "differences" not in figures:
        return
    require(len(figures["differences"]) == 1, f"{name}: pool and plan differ by {figures['differences']} bytes: not a constant")
    require(figures["difference_bytes"] >= 0, f"{name}: the pool used {-figures['difference_bytes']:,} bytes less than the plan reserves")
    require(figures["driver_allocations"] == 0, f"{name}: {figures['driver_allocations']} allocations in a step after the first")
    require(figures["overhead_bytes"] <= figures["planned_overhead_bytes"],
            f"{name}: {figures['overhead_bytes']:,} bytes are used beside the pool (other processes included), the plan has "
            f"{figures['planned_overhead_bytes']:,}")
