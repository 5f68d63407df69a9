"""Settings that are chosen on paper: is the choice next to the fastest?"""
from ..case import kernels
from ..outcome import require

IS_SPEED = True

STEPS, WARMUP = 8, 3
CHUNK, FAST = "head_chunk", "fast accumulation"
FLAGS = {CHUNK: ["--config", "qwen2.5-0.5b", "--seq", 1024, "--micro-batch", 8, "--accum", 1, "--dtype", "bf16"],
         FAST: ["--config", "qwen2.5-1.5b", "--set", "model.layers=8", "--seq", 1024, "--micro-batch", 8, "--accum", 1, "--dtype", "bf16", "--fp8", "tensor"]}
FORMS = {CHUNK: {chunk: ["--set", f"memory.head_chunk={chunk}"] for chunk in ("auto", 512, 1024, 2048, 4096)},
         FAST: {f"{choice}{again}": ["--set", f"fp8.fast_accumulation={choice}"] for again in ("", " again") for choice in ("false", "true")}}
CASES = {CHUNK: 25, FAST: 20}
# `auto` may be slower than the fastest by as much as times vary.
SLOWER_MAX = 0.03


def sources(case):
    return kernels("cross_entropy") if case == CHUNK else kernels("fp8")


def run(place, found, case):
    rows = found.table("Settings that are chosen", "setting", "step, ms", "loss at the end", "SM clock, MHz")
    for name, more in FORMS[case].items():
        trained, watch = place.train_watched(*place.sized(*FLAGS[case], *more), "--steps", STEPS)
        ms = trained.metrics.median("step_ms", WARMUP)
        rows.append([f"{case} {name}", f"{ms:.2f}", f"{trained.metrics.steps[-1]['loss']:.5f}", watch.sm_mhz])
        found.figures[f"{name}, ms"] = ms
    times = found.figures
    if case == CHUNK and place.is_gpu:
        slower = times["auto, ms"] / min(times.values()) - 1
        require(slower < SLOWER_MAX, f"memory.head_chunk = auto is {100 * slower:.1f} % slower than the fastest")
