"""Every operation of a step beside its two floors: FLOPs over the peak, bytes over the bandwidth."""
import json

from ..outcome import require

CHECKS = "what each operation of a step takes, beside the least that FLOPs and bytes allow; the update beside the bandwidth of copies"
SECONDS = 50

ON_CUDA = [("qwen2.5-0.5b", 1024, 8), ("llama-3.2-1b", 4096, 1)]
ON_CPU = [("tiny", 128, 4)]
# Shorter ones are in the JSON.
SHARE_SHOWN = 0.005


def run(place, found):
    rows = found.table("Operations", "model", "operation", "sizes", "calls", "ms", "share", "by FLOPs, ms", "by bytes, ms", "times its floor")
    profiles = []
    for config, seq, micro_batch in ON_CUDA if place.is_cuda else ON_CPU:
        finished = place.trainer("profile", "--config", config, "--seq", seq, "--micro-batch", micro_batch, "--accum", 1, "--device",
                                 place.device, "--json")
        require(finished.code == 0, f"trainer profile: {finished.complaint()}")
        profile = json.loads(finished.stdout)
        profiles.append(dict(model=config, seq=seq, micro_batch=micro_batch, **profile))
        rows.extend(row(config, operation, profile) for operation in profile["operations"]
                    if operation["ms"] > SHARE_SHOWN * profile["total_ms"])
        found.notes.append(f"{config}: {profile['total_ms']:.1f} ms, {profile['floor_ms']:.1f} at the least; the update reaches "
                           f"{100 * update_share(profile):.0f} % of a copy's bandwidth (asked: 85 %)")
    found.figures.update(profiles=profiles)


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
