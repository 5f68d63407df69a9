"""Libraries take all their device memory before the plan is relied on: nothing is loaded from the first step on."""
import bisect

from ..case import MEMORY, REHEARSAL
from ..outcome import require
from . import plan

STEPS = 3
FLAGS = {
    "llama-15m, f32": ["--config", "llama-15m", "--dtype", "f32", "--attention", "eager", "--recompute", "none"],
    "Qwen2.5-0.5B": ["--config", "qwen2.5-0.5b", "--seq", 1024, "--micro-batch", 4, "--accum", 2, "--dtype", "bf16", "--recompute", "full"],
    "GPT-2": ["--config", "gpt2", "--micro-batch", 4, "--accum", 2, "--dtype", "bf16", "--recompute", "none"],
}
NEARLY_FULL = "a nearly full card"
CASES = {**dict.fromkeys(FLAGS, 10), NEARLY_FULL: 25}

# As many sequences of the built-in text as there are.
MICRO_BATCHES = range(190, 3, -2)


def sources(_case):
    return (*REHEARSAL, *MEMORY)


def run(place, found, case):
    if case == NEARLY_FULL:
        place.need_gpu("a full card")
        return a_nearly_full_card(place, found)
    trained = place.train(*place.sized(*FLAGS[case]), "--steps", STEPS)
    if place.is_cuda:
        beside = beside_pool(trained.metrics)
        found.figures.update(beside_bytes=beside[0], planned_overhead_bytes=trained.plan["device_overhead_bytes"])
        judge(case, beside)


def beside_pool(metrics):
    """Memory of the device in use beside the run's pool, by step."""
    return [step["device_total_used_bytes"] - step["device_reserved_high_bytes"] for step in metrics.steps]


def judge(name, beside):
    require(len(set(beside)) == 1, f"{name}: memory beside the pool changes over the steps, {beside}: something was loaded after the rehearsal")


def a_nearly_full_card(place, found):
    """The largest micro-batch that fits by the plan: it trains, and the plan holds."""
    total = place.gpu()["memory"]["total"]
    base = ["--config", "qwen2.5-0.5b", "--dtype", "bf16", "--seq", 1024, "--accum", 1, "--recompute", "none"]
    def needed_by(micro_batch):
        planned = place.plan(*base, "--micro-batch", micro_batch)
        return planned["reserved_bytes"] + planned["device_overhead_bytes"]

    # Larger ones need more memory, so search by bisection.
    first = bisect.bisect_left(MICRO_BATCHES, True, hi=len(MICRO_BATCHES) - 1, key=lambda micro_batch: needed_by(micro_batch) <= total)
    micro_batch = MICRO_BATCHES[first]
    needed = needed_by(micro_batch)
    trained = place.train(*base, "--micro-batch", micro_batch, "--steps", 2)
    figures = plan.compare(trained.plan, trained.metrics, True)
    name = f"micro-batch {micro_batch}"
    plan.judge(name, figures)
    found.figures.update(micro_batch=micro_batch, needed_bytes=needed, total_bytes=total, share=needed / total)
    found.notes.append(f"{name}: {100 * needed / total:.1f} % of the card's memory by the plan, and it trains")
