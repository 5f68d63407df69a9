"""Each family of kernels by itself, by CUDA events, beside what people would use on the same shapes."""
import json

from ..case import ATTENTION, kernels
from ..commands import run as run_command
from ..outcome import OutOfTime, require

CHECKS = "TFLOP/s and GB/s of each kernel by CUDA events beside the card's copy rate, with clock, power, registers and blocks; torch's kernels on the same shapes; variants of a tile"
IS_SPEED = True

# Names that `kernel_times --case` and peers/torch_kernels.py know, with what each may take: half for ours, half for theirs.
CASES = {"attention": 30, "grouped": 20, "fp8": 20, "adamw": 10, "cross_entropy": 10, "rms_norm": 10, "swiglu": 10, "qkv": 10, "dequantise": 10}
SOURCES = {"attention": ATTENTION, "grouped": kernels("grouped_matmul", "experts"), "fp8": kernels("fp8", "matmul"), "rms_norm": kernels("rms_norm", "norm_backward"),
           "qkv": kernels("qkv", "rotary")}
COLUMNS = ("kernel", "model", "shape", "by", "us", "least us", "TFLOP/s", "GB/s", "copies, GB/s", "SM clock, MHz", "watts", "registers", "blocks an SM", "ours is faster by")


def sources(case):
    return SOURCES.get(case, kernels(case))


def run(place, found, case):
    rows = found.table("Kernels", *COLUMNS)
    place.need_gpu("a kernel's time")
    program, seconds = place.bundle / "kernel_times", 0.5 * CASES[case]
    require(program.exists(), "the bundle has no kernel_times")
    ours = timed([program, "--json", "--case", case, "--seconds", f"{0.7 * seconds:.0f}"], place, place.environment, place.clock.within(seconds))
    theirs = timed([*place.peer, place.bundle / "peers" / "torch_kernels.py", "--case", case], place, place.peer_environment, place.clock)
    for record in (*ours, *theirs):
        rows.append(row(record, best(ours, record)))
    require(ours, "kernel_times timed nothing")
    for record in theirs:
        own = best(ours, record)
        if own:
            found.figures[f"{record['kernel']}, {record['model']}, {record['peer']}"] = round(record["us"] / own["us"], 3)
    found.figures.update(rows=len(ours), peers=len(theirs))
    if not theirs:
        found.notes.append("no peer was timed: is there a PyTorch for this GPU (--python)?")


def timed(command, place, environment, clock):
    """The lines of JSON that a program prints, also where it had no time to print all."""
    try:
        stdout = run_command(command, clock, environment).stdout
    except OutOfTime as ended:
        stdout = ended.stdout
    return [json.loads(line) for line in stdout.splitlines() if line.startswith("{") and line.endswith("}")]


def best(ours, record):
    """Our fastest variant of the same kernel, model and shape."""
    same = [one for one in ours if all(one[key] == record[key] for key in ("kernel", "model", "shape"))]
    return min(same, key=lambda one: one["us"], default=None)


def row(record, own):
    number = lambda key, form: "-" if record.get(key) is None else format(record[key], form)
    name = record.get("peer") or (f"trainer, {record['variant']}" if record.get("variant") else "trainer")
    ratio = f"{record['us'] / own['us']:.2f}" if own and record.get("peer") else "the fastest" if own is record and record.get("variant") else "-"
    return [record["kernel"], record["model"], record["shape"], name, number("us", ".1f"), number("min_us", ".1f"), number("tflops", ".0f"), number("gbps", ".0f"),
            number("copy_gbps", ".0f"), number("sm_mhz", ".0f"), number("watts", ".0f"), number("registers", "d"), number("blocks_per_sm", "d"), ratio]
