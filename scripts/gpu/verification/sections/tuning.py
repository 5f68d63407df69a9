"""Algorithms of products, timed once and kept in a file: a run takes them, says so, and repeats its bits."""
import json

from ..case import PRODUCTS, device
from ..outcome import require

IS_SPEED = True
CASES = {"Qwen2.5-0.5B": 45}

STEPS, WARMUP = 8, 3
SHAPE = ["--config", "qwen2.5-0.5b", "--seq", 1024, "--micro-batch", 8, "--accum", 1, "--dtype", "bf16"]
# Of a step's time: measured choices may be as slow as the heuristic's, within what a clock varies, but not slower.
SLOWER_MAX = 0.03
# Relative, in loss: products of other algorithms add up in another order.
NEAR = 0.005


def sources(_case):
    return (*device("tuning"), *PRODUCTS)


def run(place, found, _case):
    place.need_gpu("a measured choice of algorithms", *SHAPE)
    file = place.file("algorithms.json")
    tuned = place.trainer("tune", "--device", "cuda", *SHAPE, "--out", file, "--json")
    require(tuned.code == 0, f"trainer tune: {tuned.complaint()}")
    require(file.exists(), f"`trainer tune --out` left no {file.name}")
    found.figures["tune_s"] = tuned.seconds
    # In turn, since clocks drift.
    runs = {name: place.train(*SHAPE, "--steps", STEPS, "--set", f"hardware.algorithms={choice}")
            for name, choice in (("heuristic", "heuristic"), ("tuned", file), ("tuned again", file), ("heuristic again", "heuristic"))}
    rows = found.table("Algorithms of products", "run", "algorithms", "step, ms", "tokens/s", "loss at the end")
    for name, trained in runs.items():
        metrics = trained.metrics
        rows.append([name, json.dumps(metrics.header["algorithms"]), f"{metrics.median('step_ms', WARMUP):.2f}",
                     f"{metrics.median('tokens_per_s', WARMUP):,.0f}", f"{metrics.steps[-1]['loss']:.5f}"])
    found.figures["speed_ratio"] = ratio(runs)
    found.notes.append(f"a step by measured algorithms takes {1 / ratio(runs):.3f} of the heuristic's time; tuning took {tuned.seconds:.0f} s")
    judge(runs, file.name)


def ratio(runs):
    """How much faster the measured algorithms are, each taken at its best of two runs."""
    best = lambda *names: min(runs[name].metrics.median("step_ms", WARMUP) for name in names)
    return best("heuristic", "heuristic again") / best("tuned", "tuned again")


def judge(runs, file):
    said = {name: json.dumps(trained.metrics.header["algorithms"]) for name, trained in runs.items()}
    for name in ("tuned", "tuned again"):
        require(file in said[name], f"{name}: the run's record does not name {file}: {said[name]}")
    require(said["tuned"] == said["tuned again"], f"the same file is recorded as {said['tuned']} and {said['tuned again']}")
    for name in ("heuristic", "heuristic again"):
        require(said[name] == '"heuristic"', f"{name}: the run's record says {said[name]}")
    for first, second in (("tuned", "tuned again"), ("heuristic", "heuristic again")):
        require(runs[first].metrics.bits() == runs[second].metrics.bits(), f"{first}: a second run has other bits")
    for trained in runs.values():
        require(trained.metrics.peaks() == {trained.plan["peak_bytes"]}, "a peak is not the planned one")
    tuned, heuristic = (runs[name].metrics.steps[-1]["loss"] for name in ("tuned", "heuristic"))
    require(abs(tuned / heuristic - 1) < NEAR, f"a loss of {tuned} with the file, {heuristic} without")
    require(ratio(runs) > 1 - SLOWER_MAX, f"steps by measured algorithms are {100 * (1 / ratio(runs) - 1):.1f} % slower than by the heuristic's")
