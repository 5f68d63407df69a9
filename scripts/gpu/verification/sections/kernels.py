"""Each family of kernels by itself, by CUDA events, beside what people would use on the same shapes."""
import json

from ..case import ATTENTION, NORM_BACKWARD, PRODUCTS, kernels
from ..commands import Finished, run as run_command
from ..gpu import Watch
from ..outcome import OutOfTime, Skipped, require

IS_SPEED = True

# Of each family the names that `kernel_times` knows, and their sources.
FAMILIES = {
    "attention": (("flash_attention", "flash_attention_backward"), ATTENTION),
    "grouped": (("grouped_matmul", "grouped_matmul.data", "grouped_gradient"), kernels("grouped_matmul", "grouped_matmul_sm90", "experts")),
    "delta": (("gated_delta", "gated_delta_backward", "short_convolution", "short_convolution_backward", "gated_norm", "gated_norm_backward",
               "cached_delta", "cached_convolution"), kernels("gated_delta", "short_convolution", "gated_norm", "delta_cache")),
    "products": (("matmul", "scaled_mm", "scaled_mm.fast", "matmul.data", "scaled_mm.data", "matmul.weights", "scaled_mm.weights"), (*kernels("matmul", "fp8"), *PRODUCTS)),
    "adamw": (("adamw", "adamw.bf16", "adamw.8bit"), kernels("adamw")),
    "cross_entropy": (("cross_entropy",), kernels("cross_entropy")),
    "rms_norm": (("rms_norm", "rms_norm_backward"), (*kernels("rms_norm"), *NORM_BACKWARD)),
    "codes": (("abs_max", "quantise", "quantise_transposed", "transpose_codes"), kernels("fp8")),
    "qkv": (("split_qkv", "join_qkv"), kernels("qkv", "rotary")),
    "swiglu": (("swiglu", "swiglu_backward", "weighed_swiglu", "weighed_swiglu_backward", "sigmoid_gate", "sigmoid_gate_backward"), kernels("swiglu", "experts", "sigmoid_gate")),
    "routes": (("route", "route_backward", "group_by_expert", "sum_rows"), kernels("router", "experts")),
    "updates": (("variance_sums", "update_squares", "adafactor_step", "gram", "momentum"), kernels("adafactor", "muon")),
    "passes": (("dequantise_nf4", "embedding", "embedding_backward", "norm_grains", "copy", "copy.to_f32"), kernels("dequantise", "embedding", "norm", "elementwise")),
}
# All peers are timed by one process, after ours: to start PyTorch takes longer than most kernels' times.
PEERS = "peers"
CASES = {**dict.fromkeys(FAMILIES, 7), "attention": 16, "grouped": 14, "delta": 14, "products": 14, PEERS: 45}
COLUMNS = ("kernel", "model", "shape", "by", "us", "least us", "TFLOP/s", "GB/s", "copies, GB/s", "SM clock, MHz", "watts", "registers", "blocks an SM", "ours is faster by")


def sources(case):
    return FAMILIES[case][1] if case in FAMILIES else ("benches/peers/torch_kernels.py",)


def run(place, found, case):
    if not place.is_cuda:
        place.need_gpu("a kernel's time")
    rows = found.table("Kernels", *COLUMNS)
    (peers if case == PEERS else ours)(place, found, case, rows)


def ours(place, found, case, rows):
    program = place.bundle / "kernel_times"
    require(program.exists(), "the bundle has no kernel_times")
    names = [word for kernel in FAMILIES[case][0] for word in ("--case", kernel)]
    records, ended = timed([program, "--json", *names, "--seconds", CASES[case] - 2, *([] if place.is_gpu else ["--tiny"])], place.environment, place.clock)
    place.kernels.extend(records)
    rows.extend(row(record, None) for record in records)
    times = [record for record in records if "us" in record]
    # The fastest kind, if there are several.
    found.figures.update({f"{record['kernel']}, {record['model']}, us": round(best(times, record)["us"], 1) for record in times})
    judge(ended)
    require(times, "kernel_times timed nothing")


def peers(place, found, _case, rows):
    command = [*place.peer, place.bundle / "peers" / "torch_kernels.py", *([] if place.is_gpu else ["--tiny", "--device", "cpu"])]
    with Watch() as watch:
        records, ended = timed(command, place.peer_environment, place.clock)
    found.figures.update(watch.figures())
    rows.extend(row({**record, **watch.figures()}, best(place.kernels, record)) for record in records)
    for record in records:
        own = best(place.kernels, record)
        if own:
            found.figures[f"{record['kernel']}, {record['model']}, {record['peer']}"] = round(record["us"] / own["us"], 3)
    if not records and isinstance(ended, Finished):
        raise Skipped(f"no peer was timed (--python names a PyTorch): {ended.complaint()}")
    judge(ended)


def timed(command, environment, clock):
    """The lines of JSON that a program prints, and how it ended: Finished, or OutOfTime."""
    try:
        ended = run_command(command, clock, environment)
    except OutOfTime as late:
        ended = late
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{") and line.endswith("}")], ended


def judge(ended):
    """Times that a program did not come to are open, whatever it timed before."""
    if isinstance(ended, OutOfTime):
        raise ended
    require(ended.code == 0, ended.complaint())
    if "are left" in ended.stderr:
        raise OutOfTime(ended.stderr.strip().splitlines()[-1])


def best(ours, record):
    """Our fastest variant of the same kernel for the same model."""
    same = [one for one in ours if "us" in one and all(one[key] == record[key] for key in ("kernel", "model"))]
    return min(same, key=lambda one: one["us"], default=None)


def row(record, own):
    text = lambda key, form: "-" if record.get(key) is None else ",".join(map(str, record[key])) if isinstance(record[key], list) else format(record[key], form)
    # Products of FP8 count half in `kernel_times`.
    tflops = 2 * record["tflops"] if record["kernel"].startswith("scaled_mm") and "peer" not in record and "us" in record else record.get("tflops")
    record = {**record, "tflops": tflops or None}
    name = record.get("peer") or f"trainer, {text('variant', '')}"
    ratio = f"{record['us'] / own['us']:.2f}" if own and "peer" in record else record.get("refused", "-")
    return [record["kernel"], record["model"], " x ".join(map(str, record["shape"])), name, text("us", ".1f"), text("min_us", ".1f"), text("tflops", ".0f"), text("gbps", ".0f"),
            text("copy_gbps", ".0f"), text("sm_mhz", ".0f"), text("watts", ".0f"), text("registers", "d"), text("blocks_per_sm", "d"), ratio]
