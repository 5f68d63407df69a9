"""Kernels under compute-sanitizer: accesses outside of blocks, races in shared memory, barriers."""
import re
import shutil
import zlib

from ..case import ATTENTION, kernels
from ..commands import run as run_command
from ..outcome import Skipped, require
from . import conformance

# Its message if it may not inspect the device, as in some containers.
REFUSALS = ("Device not supported", "Failed to initialize", "profiling is not supported", "Unable to find injection")
SUMMARY = re.compile(r"(ERROR SUMMARY: \d+ errors?|RACECHECK SUMMARY: \d+ hazards? displayed \(.*\))")
# The exit code that we ask for where there are findings.
FOUND = 99
CLEAN = re.compile(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed)")

STEP = ["train", "--config", "tiny", "--device", "cuda", "--quiet", "--steps", 1, "--micro-batch", 2, "--accum", 1, "--seq", 160,
        "--state-dtype", "8bit", "--save-every", 0]
# FP8's steps have the kernels of bf16 too.
IN_FP8 = ("--dtype", "bf16", "--fp8", "tensor")
STEPS = {"racecheck, a step in FP8": ("racecheck", "flash", IN_FP8), "racecheck, a step in f32": ("racecheck", "eager", ("--dtype", "f32")),
         "memcheck, a step in bf16": ("memcheck", "flash", ("--dtype", "bf16")), "synccheck, a step in FP8": ("synccheck", "flash", IN_FP8)}
# Tests of the conformance suite under memcheck, those that it has not seen first. Tensors have blocks of their own there, so that an access to
# the first byte behind one is found.
GROUPS = [("fp8", "scaled_mm", "dequantise"), ("gated_delta", "short_convolution", "gated_norm", "delta_cache", "sigmoid_gate"), ("latent", "router", "muon", "gram", "adafactor"),
          ("rms_norm", "swiglu", "rotary", "qkv", "elementwise", "embedding", "norm", "cross_entropy", "experts"),
          ("layer_norm", "gelu", "positions", "preference", "dropout"), ("adamw", "matmul", "grouped_products"), ("attention",), ("flash_attention",), ("policy",)]
TESTS = {f"memcheck, {', '.join(names)}": names for names in GROUPS}
CASES = {**dict.fromkeys(TESTS, 20), **dict.fromkeys(STEPS, 12)}
# Failed driver calls are ignored: the trainer reports its own, and a library may try some that fail.
OPTIONS = {"memcheck": ["--report-api-errors", "no"]}


def kernel_names(binary):
    """The kernels of the machine code that is in a binary, compressed: each has a section of this name."""
    held = binary.read_bytes()
    return {name.decode() for found in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", held)
            for name in re.findall(rb"\.nv\.info\.(\w+)", inflated(held, found.start()))}


def inflated(held, start, most=1 << 24):
    """What is compressed from here on, by any level; as a rule nothing is, and the two bytes are there by chance."""
    try:
        return zlib.decompressobj().decompress(memoryview(held)[start:start + most])
    except zlib.error:
        return b""


def sources(case):
    if case in STEPS:
        return (*ATTENTION, *kernels("fp8", "rms_norm", "swiglu"))
    return tuple(path for name in TESTS[case] for path in conformance.sources(name) if "tests" not in path)


def command(place, case):
    """The tool, and what it runs."""
    if case in TESTS:
        return "memcheck", [place.bundle / "conformance", "--exact", *TESTS[case], "--test-threads", 1]
    tool, attention, flags = STEPS[case]
    return tool, [place.bundle / "trainer", *STEP, "--attention", attention, *flags, "--out", place.new_folder()]


def run(place, found, case):
    place.need_gpu("compute-sanitizer")
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise Skipped("compute-sanitizer is not on PATH")
    name, words = command(place, case)
    options = ["--tool", name, "--error-exitcode", FOUND, *OPTIONS.get(name, [])]
    finished = run_command([tool, *options, *words], place.clock, {**place.environment, "CONFORMANCE_DEVICES": "gpu"})
    said = finished.stdout + finished.stderr
    if any(refusal in said for refusal in REFUSALS):
        raise Skipped(f"compute-sanitizer cannot look at this GPU: {next(r for r in REFUSALS if r in said)}")
    summary = SUMMARY.search(said)
    found.figures["summary"] = summary.group(1) if summary else f"exit code {finished.code}"
    if finished.code == 0 and CLEAN.search(said):
        return
    findings, ours = findings_of(said), kernel_names(place.bundle / "trainer")
    require(ours, "the trainer holds no kernels")
    # Shared memory is a kernel's own affair. Outside of shared memory, arguments of ours may be the cause.
    of_library = name == "racecheck" and findings and not any(names_one_of(ours, line) for line in findings)
    require(of_library and finished.code in (0, FOUND), f"{case}: exit code {finished.code}; {(findings or ['it said nothing'])[0]}")
    found.notes.append(f"{case}: {len(findings)} lines about kernels of cuBLASLt, none about the trainer's")


def findings_of(said):
    """The tool's lines, without its banner and summary."""
    lines = [line.lstrip("= ").strip() for line in said.splitlines() if line.startswith("=========")]
    return [line for line in lines if line and not line.startswith("COMPUTE-SANITIZER") and "SUMMARY" not in line]


def names_one_of(kernels, line):
    return not kernels.isdisjoint(re.findall(r"\w+", line))
