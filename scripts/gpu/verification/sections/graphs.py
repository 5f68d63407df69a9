"""Micro-batches that are launched as one CUDA graph: the same bits and the same memory, in less time where launches are many."""
import statistics

from ..case import GRAPHS
from ..outcome import require

IS_SPEED = True

STEPS, WARMUP, ACCUMULATION = 20, 4, 4
OFF = ["--set", "train.graphs=off"]
SMALL = ["--config", "llama-15m", "--seq", 512, "--micro-batch", 2, "--recompute", "core_attn,mlp"]
ACTIVATIONS, STATES = ["--offload-activations", "layernorm"], ["--offload-optimizer", "pinned"]
# This shape was once 8 % slower with graphs; these cases show which part causes it.
FLAGS = {
    "recompute": SMALL, "recompute, activations away": [*SMALL, *ACTIVATIONS], "recompute, states away": [*SMALL, *STATES],
    "recompute, both away": [*SMALL, *ACTIVATIONS, *STATES],
    "small": ["--config", "llama-15m", "--seq", 256, "--micro-batch", 1],
    "GPT-2, dropout": ["--config", "gpt2", "--seq", 512, "--micro-batch", 2],
    "Qwen2.5-0.5B": ["--config", "qwen2.5-0.5b", "--seq", 1024, "--micro-batch", 4],
}
CASES = {**dict.fromkeys(FLAGS, 12), "Qwen2.5-0.5B": 25}


def sources(_case):
    return GRAPHS


def run(place, found, case):
    rows = found.table("Micro-batches as graphs", "run", "peak, bytes", "step with, ms", "step without, ms", "faster by", "SM clock with, MHz", "without")
    flags = [*FLAGS[case], "--accum", ACCUMULATION, "--steps", STEPS, "--dtype", "bf16"]
    place.need_gpu("a graph", *flags)
    # In turn, since clocks drift.
    pairs = [(place.train_watched(*flags), place.train_watched(*flags, *OFF)) for _ in range(2)]
    (graphs, watch), (plain, plain_watch) = pairs[0]
    for (one, _), (other, _) in pairs:
        judge(case, one, other)
    ms = [statistics.median([pair[side][0].metrics.median("step_ms", WARMUP) for pair in pairs]) for side in (0, 1)]
    found.figures.update(graphs_ms=ms[0], plain_ms=ms[1], faster=ms[1] / ms[0] - 1)
    rows.append([case, f"{graphs.plan['peak_bytes']:,}", f"{ms[0]:.2f}", f"{ms[1]:.2f}", f"{100 * (ms[1] / ms[0] - 1):.1f} %", watch.sm_mhz, plain_watch.sm_mhz])


def judge(name, graphs, plain):
    said, other = graphs.metrics.header["graphs"], plain.metrics.header["graphs"]
    why = graphs.metrics.header.get("graphs_off")
    require(said is True, f"{name}: the run's record says that it has no graphs: {why}")
    require(other is False, f"{name}: the record of the run with train.graphs=off says that it has graphs")
    require(len(set(plain.metrics.bits())) == STEPS, f"{name}: the steps do not differ from one another")
    require(graphs.metrics.bits() == plain.metrics.bits(), f"{name}: other bits than without graphs")
    for trained in (graphs, plain):
        require(trained.metrics.peaks() == {trained.plan["peak_bytes"]},
                f"{name}: planned {trained.plan['peak_bytes']:,} bytes, the peaks are {sorted(trained.metrics.peaks())}")
    for key in ("peak_bytes", "h2d_bytes", "d2h_bytes", "replayed"):
        one, two = ([step[key] for step in trained.metrics.steps] for trained in (graphs, plain))
        require(one == two, f"{name}: {key} of the steps are {one} with graphs, {two} without")
    allocations = sum(step["driver_allocations"] for step in graphs.metrics.steps[1:])
    require(allocations == 0, f"{name}: {allocations} allocations after the first step")
