"""The machine: its GPU, driver and libraries, and how fast it copies and multiplies."""
import json

from ..outcome import require

CASES = {"machine": 30}

# Of a GPU alone.
PAGE_LOCKED = {"copies from page-locked memory": "h2d_gbps", "copies to page-locked memory": "d2h_gbps", "both at once, added up": "both_ways_gbps"}


def run(place, found, _case):
    finished = place.trainer("doctor", "--json")
    require(finished.code == 0, f"trainer doctor: {finished.complaint()}")
    place.doctor = json.loads(finished.stdout)
    if place.is_cuda:
        require(place.doctor["cuda_built"], "this binary was built without CUDA")
        missing = "; ".join(place.doctor["missing"]) or "doctor lists no GPU"
        require(place.doctor["gpus"], f"no GPU can be used: {missing}")
        measured = (place.gpu(), place.gpu()["bf16"], "bf16")
    else:
        measured = (place.doctor["host"], place.doctor["host"]["f32"], "f32")
    report(found, *measured)
    found.figures.update({name: value for name, value in measured[1].items() if isinstance(value, float)}, name=measured[0].get("name", "the CPU"))


def report(found, device, rates, dtype):
    peak = device.get("peak_tflops")
    share = f" ({100 * rates['gemm_tflops'] / peak:.0f} % of {peak})" if peak else ""
    rows = found.table("Rates", "what", "rate")
    rows.append([f"matrix products, {dtype}", f"{rates['gemm_tflops']:.3g} TFLOP/s{share}"])
    rows.append(["copies on the device, read and written", f"{rates['copy_gbps']:.0f} GB/s"])
    rows.append(["uploads", f"{rates['upload_gbps']:.1f} GB/s"])
    rows.append(["downloads", f"{rates['download_gbps']:.1f} GB/s"])
    for what, key in PAGE_LOCKED.items():
        if key in device:
            rows.append([what, f"{device[key]:.1f} GB/s"])
