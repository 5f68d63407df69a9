"""Optimizer states and activations in pinned host memory: the same bits, and what crosses as planned."""
from ..case import HOMES, crate
from ..outcome import require

CASES = {"f32": 20, "bf16": 20}

STEPS = 5
OPTIMIZER = ["--offload-optimizer", "pinned"]
# A slab for each part of a small model, or copies would never overlap.
SLABS = [*OPTIMIZER, "--set", "offload.slab_mib=1"]
OFFLOADS = {
    "optimizer": SLABS,
    "optimizer, at the end": [*SLABS, "--set", "offload.window=end"],
    "half of the optimizer": [*SLABS, "--set", "offload.fraction=0.5"],
    "activations": ["--offload-activations", "layernorm,mlp,attn_out"],
    "both": [*SLABS, "--offload-activations", "block_input", "--recompute", "full"],
}


def sources(_case):
    return (*HOMES, *crate("model", "offload"))


def run(place, found, dtype):
    rows = found.table("Offload", "offloaded", "peak, bytes", "pinned, bytes", "to the device, bytes a step", "back, bytes a step", "same bits")
    model = ["--config", "llama-15m" if place.is_gpu else "tiny", "--accum", 3, "--steps", STEPS, "--dtype", dtype, "--state-dtype", "8bit"]
    resident, *offloaded = place.train_all([model, *([*model, *flags] for flags in OFFLOADS.values())])
    for name, trained in zip(["nothing", *OFFLOADS], [resident, *offloaded]):
        last = trained.metrics.steps[-1]
        same = "yes" if trained.metrics.bits() == resident.metrics.bits() else "NO"
        rows.append([f"{name}, {dtype}", *(f"{last[key]:,}" for key in ("peak_bytes", "host_pinned_bytes", "h2d_bytes", "d2h_bytes")), same])
    judge(dtype, resident, dict(zip(OFFLOADS, offloaded)))


def judge(dtype, resident, offloaded):
    for name, trained in offloaded.items():
        require(trained.plan["host_pinned_bytes"] > 0, f"{name}, {dtype}: nothing is pinned")
        require(trained.plan["d2h_bytes"] > resident.plan["d2h_bytes"], f"{name}, {dtype}: nothing crosses")
        require(trained.metrics.bits() == resident.metrics.bits(), f"{name}, {dtype}: other bits than without offload")
        for key in ("peak_bytes", "host_pinned_bytes", "h2d_bytes", "d2h_bytes"):
            measured = {step[key] for step in trained.metrics.steps}
            require(measured == {trained.plan[key]}, f"{name}, {dtype}: {key} are {sorted(measured)}, planned {trained.plan[key]:,}")
