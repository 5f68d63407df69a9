"""Checks within seconds what would make the other sections worthless: driver, libraries, memory that others hold, clocks."""
from ..gpu import query, selected
from ..libraries import library_path
from ..outcome import require

CASES = {"machine": 30}

# Figures that nvidia-smi is asked for one by one, since one unknown name makes the whole query fail.
QUERIES = dict(driver="driver_version", total_mib="memory.total", used_mib="memory.used", clock_mhz="clocks.sm", clock_max_mhz="clocks.max.sm",
               power_limit_w="power.limit", power_default_w="power.default_limit", throttling="clocks_throttle_reasons.active",
               temperature_c="temperature.gpu", compute_mode="compute_mode", mig="mig.mode.current")

# Reasons for which a driver holds clocks down, by their bits (nvml.h); idle GPUs have the first.
REASONS = {0x2: "application clocks are set", 0x4: "the power limit", 0x8: "hardware slowdown", 0x20: "heat, by software",
           0x40: "heat, by hardware", 0x80: "the power brake", 0x100: "display clocks"}

# If other processes hold more than this, plans and times are of no use.
OTHERS_MIB_MAX = 2048


def run(place, found, _case):
    if not place.is_gpu:
        found.notes.append("without a GPU there is no driver to ask")
        return one_step(place)
    said = {name: query(field, max(0.1, min(5, place.clock.left() / 2))) for name, field in QUERIES.items()}
    said.update(cublaslt_folder=str(library_path()[1] or ""), gpu=selected())
    found.figures.update(said)
    rows = found.table("The GPU as it is", "what", "value")
    rows.extend([name, str(value)] for name, value in said.items() if value is not None)
    found.notes.extend(warnings(said))
    # At once, not at the end of the report.
    for note in found.notes:
        print(f"  note: {note}", flush=True)
    require(said["cublaslt_folder"], "no libcublasLt: `pip install` NVIDIA's package for it or PyTorch, or install a toolkit")
    one_step(place)
    others = said["used_mib"]
    require(others is None or float(others) <= OTHERS_MIB_MAX, f"other processes hold {others} MiB of the GPU: stop them, or take another GPU")


def one_step(place):
    """Driver, libraries and kernels, in the shortest run there is: what it refuses, it says."""
    place.train("--config", "tiny", "--steps", 1)


def warnings(said):
    """Facts that the reader of the figures below must know."""
    number = lambda name: float(said[name]) if said.get(name) else None
    found = []
    reasons = int(said["throttling"], 16) if said.get("throttling") else 0
    held = [reason for bit, reason in REASONS.items() if reasons & bit]
    if held:
        found.append(f"clocks are held down: {', '.join(held)}")
    limit, default = number("power_limit_w"), number("power_default_w")
    if limit and default and limit < default:
        found.append(f"the power limit is {limit:.0f} W, {default:.0f} W is usual")
    if said.get("mig") == "Enabled":
        found.append("MIG is on: this is a part of a GPU")
    if said.get("compute_mode") not in (None, "Default"):
        found.append(f"the compute mode is {said['compute_mode']}: runs beside one another are refused")
    return found
