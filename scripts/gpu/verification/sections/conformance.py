"""The kernels, each against an oracle in f64, and against the CPU where bits must be equal; the device's memory and copies."""
import re

from ..commands import run as run_command
from ..outcome import OutOfTime, require

CHECKS = "every kernel against f64 on poisoned memory; AdamW's bits against the CPU's; same input, same bits; memory and copies of the device"
SECONDS = 120

RESULT = re.compile(r"^test (\S+) \.\.\. (ok|FAILED|ignored)\s*$", re.MULTILINE)
SHARE = re.compile(r"^(?:test \S+ \.\.\. )?(.+) for (F32|BF16): (.+): ([0-9.]+|NaN|inf) % of the allowed error$", re.MULTILINE)


# Tests of the stand-ins and of the interpreter: they need what the build left where the bundle was made.
OF_THE_BUILD = ["interpreted::", "gpu::the_stand_in", "cudnn::on_a_device::the_stand_in", "cudnn::on_a_device::a_version"]


def results(stdout):
    """Names of the tests that passed, and of those that did not."""
    ended = RESULT.findall(stdout)
    return [name for name, result in ended if result == "ok"], [name for name, result in ended if result != "ok"]


def shares(stdout):
    """The worst error of every operation's output on devices other than the CPU, in percent of what is allowed."""
    worst = {}
    for device, dtype, output, percent in SHARE.findall(stdout):
        if device != "cpu":
            key = (device, output, dtype)
            worst[key] = max(worst.get(key, 0.0), float(percent))
    return worst


def shortened(names, most=3):
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def run(place, found):
    # The CPU beside the GPU: some tests compare the two. The emulation has been run where the bundle was made.
    devices = "cpu,gpu" if place.is_cuda else "cpu,emulation"
    environment = {**place.environment, "CONFORMANCE_DEVICES": devices}
    skipped = [word for name in OF_THE_BUILD for word in ("--skip", name)]
    try:
        finished = run_command([place.bundle / "conformance", "--nocapture", *skipped], place.clock, environment)
    except OutOfTime as ended:
        passed, failed = report(found, ended.stdout)
        require(not failed, f"failed before the time was up: {shortened(failed)}")
        raise OutOfTime(f"{ended}; {len(passed)} tests had passed") from None
    passed, failed = report(found, finished.stdout)
    require(finished.code == 0 and not failed, f"{shortened(failed) or 'the tests'} failed: {finished.complaint()}")
    require(len(passed) > 20, f"only {len(passed)} tests ran")
    require(found.figures["shares"], "no error was measured on a device other than the CPU")
    if place.gpu():
        name = place.gpu()["name"]
        require(all(device == name for device, _, _ in shares(finished.stdout)), f"not everything ran on the {name}")
    if place.is_cuda:
        check_device(place, found, environment)


def check_device(place, found, environment):
    """Memory, copies and times of the device. Without a GPU these tests run where the bundle is made. One after the other, since
    one of them fills the card."""
    finished = run_command([place.bundle / "cuda_device", "--nocapture", "--test-threads", 1], place.clock, environment)
    passed, failed = results(finished.stdout)
    found.figures.update(device_passed=passed, device_failed=failed)
    require(finished.code == 0 and passed and not failed, f"{shortened(failed) or 'tests of the device'} failed: {finished.complaint()}")
    found.notes.append(f"{len(passed)} tests of the device's memory and copies passed")


def report(found, stdout):
    passed, failed = results(stdout)
    worst = shares(stdout)
    found.figures.update(passed=passed, failed=failed, shares=[[*key, percent] for key, percent in worst.items()])
    rows = found.table("Worst errors, in percent of what is allowed", "output", "type", "device", "%")
    for (device, output, dtype), percent in sorted(worst.items(), key=lambda item: -item[1])[:8]:
        rows.append([output, dtype.lower(), device, f"{percent:.1f}"])
    found.notes.append(f"{len(passed)} tests passed, {len(failed)} failed")
    return passed, failed
