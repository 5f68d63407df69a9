"""Micro-batches that are launched as one CUDA graph: the same bits and the same memory, in less time where launches are many."""
from ..outcome import Skipped, require

CHECKS = "with accumulation 4, train.graphs=auto gives the bits, the peak and the copies of train.graphs=off; time of a step beside it"
SECONDS = 50

STEPS, WARMUP, ACCUMULATION = 6, 2, 4
OFF = ["--set", "train.graphs=off"]

# Small shapes first, where the host is the slower one. Each has what a graph could bake in: recompute, copies, dropout's keys.
CASES = {
    "llama-15m, small": ["--config", "llama-15m", "--seq", 256, "--micro-batch", 1],
    "llama-15m, recompute and offload": ["--config", "llama-15m", "--seq", 512, "--micro-batch", 2, "--recompute", "core_attn,mlp",
                                         "--offload-activations", "layernorm", "--offload-optimizer", "pinned"],
    "gpt2, dropout": ["--config", "gpt2", "--seq", 512, "--micro-batch", 2],
    "qwen2.5-0.5b": ["--config", "qwen2.5-0.5b", "--seq", 1024, "--micro-batch", 4],
}


def run(place, found):
    if not place.is_cuda:
        raise Skipped("graphs are of CUDA")
    rows = found.table("Micro-batches as graphs", "run", "peak, bytes", "step with, ms", "step without, ms", "faster by", "same bits")
    for name, flags in CASES.items():
        flags = [*flags, "--accum", ACCUMULATION, "--steps", STEPS, "--dtype", "bf16"]
        # One after the other: they are timed.
        graphs, plain = place.train(*flags), place.train(*flags, *OFF)
        figures = compare(graphs, plain)
        found.figures[name] = figures
        rows.append([name, f"{graphs.plan['peak_bytes']:,}", f"{figures['graphs_ms']:.2f}", f"{figures['plain_ms']:.2f}",
                     f"{100 * (figures['plain_ms'] / figures['graphs_ms'] - 1):.1f} %",
                     "yes" if graphs.metrics.bits() == plain.metrics.bits() else "NO"])
        judge(name, graphs, plain)


def compare(graphs, plain):
    return dict(graphs_ms=graphs.metrics.median("step_ms", WARMUP), plain_ms=plain.metrics.median("step_ms", WARMUP),
                graphs=graphs.metrics.header["graphs"], plain=plain.metrics.header["graphs"])


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
