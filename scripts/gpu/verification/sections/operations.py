"""Every operation of a step beside its two floors: FLOPs over the peak, bytes over the bandwidth."""
import json

from ..case import STEP
from ..outcome import require

IS_SPEED = True

FLAGS = {
    "Qwen2.5-0.5B, 8 x 1,024": ["--config", "qwen2.5-0.5b", "--seq", 1024, "--micro-batch", 8],
    "Llama-3.2 1B, 4,096": ["--config", "llama-3.2-1b", "--seq", 4096, "--micro-batch", 1],
}
CASES = dict.fromkeys(FLAGS, 25)
# Shorter ones are in the JSON.
SHARE_SHOWN = 0.005


def sources(_case):
    return STEP


def run(place, found, case):
    rows = found.table("Operations", "model", "operation", "sizes", "calls", "ms", "share", "by FLOPs, ms", "by bytes, ms", "times its floor")
    finished = place.trainer("profile", *place.sized(*FLAGS[case], "--accum", 1), "--device", place.device, "--json")
    require(finished.code == 0, f"trainer profile: {finished.complaint()}")
    profile = json.loads(finished.stdout)
    rows.extend(row(case, operation, profile) for operation in profile["operations"] if operation["ms"] > SHARE_SHOWN * profile["total_ms"])
    found.figures.update(total_ms=profile["total_ms"], floor_ms=profile["floor_ms"], update_share=update_share(profile))


def row(config, operation, profile):
    floors = operation["flops_floor_ms"], operation["bytes_floor_ms"]
    return [config, operation["operation"], " x ".join(str(size) for size in operation["sizes"]), operation["calls"],
            f"{operation['ms']:.3f}", f"{100 * operation['ms'] / profile['total_ms']:.1f} %", *(f"{floor:.3f}" for floor in floors),
            f"{operation['ms'] / max(floors):.2f}"]


def update_share(profile):
    """The bandwidth of the updates, over that of copies."""
    updates = [operation for operation in profile["operations"] if operation["operation"] == "adamw"]
    require(updates, "no step has no update")
    return sum(operation["bytes_floor_ms"] for operation in updates) / sum(operation["ms"] for operation in updates)
