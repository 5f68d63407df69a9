"""Attention by cuDNN beside our own: planned to the byte, repeatable, near, and how fast."""
import sys

from ..commands import run as run_command
from ..libraries import version_pair
from ..outcome import Skipped, require
from . import plan

CHECKS = ("--attention cudnn: planned peak = measured peak, the same bits twice, the second time recomputed, losses near our own kernels'; "
          "time of a step beside them")
SECONDS = 70

STEPS, WARMUP = 8, 3
# The first version with an ordered gradient of queries that needs little memory, and the GPUs for which it is taken.
VERSION_MIN, CAPABILITY = 92500, (9, 0)
# Heads of 128 and short sequences, heads of 64 and long ones.
CASES = {
    "qwen2.5-1.5b, 1,024": ["--config", "qwen2.5-1.5b", "--seq", 1024, "--micro-batch", 8],
    "llama-3.2-1b, 8,192": ["--config", "llama-3.2-1b", "--seq", 8192, "--micro-batch", 1],
}
# Relative, in loss, step by step: both round to bf16, in another order.
NEAR = 0.005


def run(place, found):
    if not place.is_cuda:
        raise Skipped("cuDNN is of CUDA")
    version = version_of(place)
    found.figures["version"] = version
    skip_unless_fit(version, place.gpu().get("capability"))
    missing = place.gpu().get("cudnn_missing")
    require(missing is None, f"cuDNN {version} is here, and not used: {missing}")
    rows = found.table("cuDNN's attention", "run", "version", "peak, bytes", "step, ms", "step with our own, ms", "faster by", "furthest loss")
    for name, flags in CASES.items():
        flags = [*flags, "--accum", 1, "--steps", STEPS, "--dtype", "bf16"]
        # One after the other: they are timed. The third repeats the second, but makes attention's outputs again.
        runs = {kind: place.train(*flags, "--attention", backend, "--recompute", mode) for kind, backend, mode in
                (("own", "flash", "none"), ("cudnn", "cudnn", "none"), ("again", "cudnn", "core_attn"))}
        figures = compare(runs)
        found.figures[name] = figures
        rows.append([name, str(figures["version"]), f"{runs['cudnn'].plan['peak_bytes']:,}", f"{figures['cudnn_ms']:.2f}",
                     f"{figures['own_ms']:.2f}", f"{100 * (figures['own_ms'] / figures['cudnn_ms'] - 1):.1f} %",
                     f"{100 * figures['furthest']:.3f} %"])
        judge(name, runs, figures)


def version_of(place):
    """cuDNN's version, as 92800, by a process of its own, since a library that fails to load may end it; none without one."""
    code = "import ctypes; print(ctypes.CDLL('libcudnn.so.9').cudnnGetVersion())"
    finished = run_command([sys.executable, "-c", code], place.clock, place.environment)
    return int(finished.stdout) if finished.code == 0 else None


def skip_unless_fit(version, capability):
    """cuDNN's attention is for new versions on new GPUs; to have neither is no failure."""
    if version is None:
        raise Skipped("there is no libcudnn.so.9 that loads; hint: pip install nvidia-cudnn-cu13")
    if version < VERSION_MIN:
        raise Skipped(f"cuDNN {version} is too old: {VERSION_MIN} is needed")
    if capability is not None and version_pair(capability) != CAPABILITY:
        raise Skipped(f"compute capability {capability}: cuDNN's attention is taken on 9.0 alone")


def compare(runs):
    pairs = list(zip(runs["cudnn"].metrics.steps, runs["own"].metrics.steps))
    return dict(version=runs["cudnn"].metrics.header.get("cudnn_version"),
                cudnn_ms=runs["cudnn"].metrics.median("step_ms", WARMUP), own_ms=runs["own"].metrics.median("step_ms", WARMUP),
                furthest=max(abs(one["loss"] / other["loss"] - 1) for one, other in pairs))


def judge(name, runs, figures):
    for kind, trained in runs.items():
        backend, said = "flash" if kind == "own" else "cudnn", trained.metrics.header["attention"]
        require(said == backend, f"{name}: the record of a run with {backend} says {said}")
        plan.judge(f"{name}, {kind}", plan.compare(trained.plan, trained.metrics, True))
    bits = {kind: trained.metrics.bits() for kind, trained in runs.items()}
    require(figures["version"], f"{name}: the run's record names no version of cuDNN")
    require(bits["cudnn"] != bits["own"], f"{name}: the bits are those of our own kernels: cuDNN was not used")
    require(runs["again"].metrics.replayed() and not runs["cudnn"].metrics.replayed(), f"{name}: core_attn is not what was recomputed")
    require(bits["again"] == bits["cudnn"], f"{name}: a second run, with recomputed attention, has other bits")
    require(figures["furthest"] < NEAR, f"{name}: losses are {100 * figures['furthest']:.2f} % from those of our own kernels")
