"""The kernels, each against an oracle in f64, and against the CPU where bits must be equal; the device's memory and copies."""
import re

from ..case import ATTENTION, CALLS, MEMORY, NORM_BACKWARD, PRODUCTS, STREAMS, device, kernels
from ..commands import run as run_command
from ..outcome import FAIL, NO_TIME, PASS, Findings, OutOfTime

# The kernels that a test is about: of the same name, but for these.
OTHER_KERNELS = {
    "scaled_mm": (*kernels("fp8", "matmul"), *PRODUCTS), "rms_norm": (*kernels("rms_norm"), *NORM_BACKWARD), "layer_norm": (*kernels("layer_norm"), *NORM_BACKWARD),
    "flash_attention": ATTENTION, "grouped_products": kernels("grouped_matmul", "grouped_matmul_sm90", "experts"), "adamw": kernels("adamw", "columns"),
    "matmul": (*kernels("matmul"), *PRODUCTS), "gram": kernels("muon", "matmul"), "cached_attention": (*kernels("cache"), *ATTENTION),
}
# Those that matter most first.
NAMED = ("flash_attention", "grouped_products", "matmul", "scaled_mm", "fp8", "adamw", "cross_entropy", "rms_norm", "swiglu", "experts", "router", "gated_delta", "short_convolution", "gated_norm", "delta_cache", "sigmoid_gate", "embedding", "norm",
         "elementwise", "rotary", "qkv", "latent", "dequantise", "muon", "gram", "adafactor", "attention", "cached_attention", "gelu", "layer_norm", "positions",
         "preference", "policy", "sum_in_order", "dropout")
# `others` are the tests that are about no kernel alone. Those of the program of the device, which has the card to itself, come last.
OF_THE_DEVICE, DEVICE_TESTS = ("beyond_int32", "device"), "crates/kernels/tests/cuda_device.rs"
CASES = {**dict.fromkeys(NAMED, 3), "flash_attention": 8, "grouped_products": 6, "matmul": 5, "beyond_int32": 35, "others": 15, "device": 15}

RESULT = re.compile(r"^test (\S+) \.\.\. (ok|FAILED|ignored)\s*$")
LISTED = re.compile(r"^(\S+): test$", re.MULTILINE)
SHARE = re.compile(r"^(?:test \S+ \.\.\. )?(.+) for (F32|BF16): (.+): ([0-9.]+|NaN|inf) % of the allowed error$", re.MULTILINE)

# Tests of the stand-ins and of the interpreter: they need what the build left where the bundle was made.
OF_THE_BUILD = ("interpreted::", "gpu::the_stand_in")


def sources(case):
    if case == "beyond_int32":
        return (*CALLS, *PRODUCTS, *kernels("matmul"), DEVICE_TESTS)
    if case == "device":
        return (*CALLS, *STREAMS, *MEMORY, *device("graphs", "calls", "timing", "measuring"), DEVICE_TESTS)
    if case == "others":
        return (*CALLS, *PRODUCTS, *(f"crates/kernels/tests/conformance/{name}.rs" for name in ("beyond_int32", "determinism", "largest", "linear", "refusals", "adamw_bits")))
    return (*OTHER_KERNELS.get(case, kernels(case)), f"crates/kernels/tests/conformance/{case}.rs")


def case_of(test):
    module = test.partition("::")[0]
    return module if module in NAMED else "others"


def shares(stdout):
    """The worst error of every operation's output on devices other than the CPU, in percent of what is allowed."""
    worst = {}
    for device, dtype, output, percent in SHARE.findall(stdout):
        if device != "cpu":
            key = (device, output, dtype)
            worst[key] = max(worst.get(key, 0.0), float(percent))
    return worst


class Tests:
    """Tests of one program, and the cases that they are of. A case ends with its last test."""

    def __init__(self, tests, end):
        self.left, self.failed, self.passed, self.end, self.last = {}, {}, {}, end, None
        for case, test in tests:
            self.left.setdefault(case, set()).add(test)

    def line(self, text):
        result = RESULT.match(text)
        case = next((case for case, tests in self.left.items() if result and result[1] in tests), None)
        if case is None:
            return
        self.left[case].discard(result[1])
        (self.passed if result[2] == "ok" else self.failed).setdefault(case, []).append(result[1])
        if not self.left[case]:
            del self.left[case]
            self.close(case)

    def close(self, case, why=None):
        passed, failed = self.passed.get(case, []), self.failed.get(case, [])
        found = Findings(figures=dict(passed=len(passed), failed=len(failed)))
        status, reason = (FAIL, f"failed: {', '.join(failed[:3])}") if failed else why or (PASS, "")
        self.last = case, status, reason, found
        self.end(*self.last)


def run_together(place, cases, end):
    """One process for many cases, since starting one takes as long as most cases."""
    # The CPU beside the GPU: some tests compare the two. The emulation has been run where the bundle was made.
    environment = {**place.environment, "CONFORMANCE_DEVICES": "cpu,gpu" if place.is_cuda else "cpu,emulation"}
    for program, names in (("conformance", [name for name in cases if name not in OF_THE_DEVICE]), ("cuda_device", [name for name in cases if name in OF_THE_DEVICE])):
        if names:
            run_program(place, program, names, environment, end)


def run_program(place, program, names, environment, end):
    of_case = case_of if program == "conformance" else lambda test: "beyond_int32" if "beyond_int32" in test else "device"
    listed = LISTED.findall(run_command([place.bundle / program, "--list"], place.clock, environment).stdout)
    tests = Tests([(of_case(test), test) for test in listed if of_case(test) in names and not test.startswith(OF_THE_BUILD)], end)
    for name in set(names) - tests.left.keys():
        end(name, FAIL, "this binary has no such test", Findings())
    # One of the device's tests fills the card: one after the other.
    threads = ["--test-threads", 1] if program == "cuda_device" else []
    command = [place.bundle / program, "--nocapture", *threads, "--exact", *(test for tests_ in tests.left.values() for test in tests_)]
    if not tests.left:
        return
    try:
        finished = run_command(command, place.clock, environment, each_line=tests.line)
        stdout, why = finished.stdout, (FAIL, f"not ended: {finished.complaint()}")
    except OutOfTime as ended:
        stdout, why = ended.stdout, (NO_TIME, str(ended))
    for case in list(tests.left):
        tests.close(case, why)
    if any(case in NAMED for case in tests.passed):
        report(place, stdout, *tests.last, end)


def report(place, stdout, case, status, reason, found, end):
    """The worst errors of all cases, with the last of them, which fails if they are of another device or of none."""
    worst = shares(stdout)
    rows = found.table("Worst errors, in percent of what is allowed", "output", "type", "device", "%")
    for (device, output, dtype), percent in sorted(worst.items(), key=lambda item: -item[1])[:8]:
        rows.append([output, dtype.lower(), device, f"{percent:.1f}"])
    name = place.gpu().get("name")
    strange = sorted({device for device, _, _ in worst} - {name}) if name else []
    # What was cut off may have measured none yet.
    if strange or not worst and status != NO_TIME:
        status, reason = FAIL, f"not on the {name}: {strange}" if strange else "no error was measured"
    end(case, status, reason, found)
