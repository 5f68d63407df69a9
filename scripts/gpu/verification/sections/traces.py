"""Times of phases and pictures of memory, by stamps in the stream."""
import shutil

from ..case import STREAMS, device
from ..outcome import require

CASES = {"phase_ms and --trace": 10, "profile --trace": 12}
FLAGS = ["--config", "qwen2.5-0.5b", "--seq", 1024, "--micro-batch", 4, "--accum", 2, "--dtype", "bf16"]
# Files that are handed back are few and small.
BYTES_MAX = 8_000_000


def sources(_case):
    return (*STREAMS, *device("timing"), "crates/kernels/src/timed.rs")


def run(place, found, case):
    if case == "profile --trace":
        folder = place.file("profile")
        finished = place.trainer("profile", *place.sized(*FLAGS), "--device", place.device, "--json", "--trace", folder)
        require(finished.code == 0, f"trainer profile --trace: {finished.complaint()}")
        return keep(place, found, folder, "profile")
    trained = place.train(*place.sized(*FLAGS), "--steps", 5, "--trace")
    for step in trained.metrics.steps[1:]:
        share = sum(step["phase_ms"].values()) / step["step_ms"]
        found.figures["share"] = share
        require(not place.is_gpu or 0.5 < share < 1.1, f"phases take {100 * share:.0f} % of the step's time")
    keep(place, found, trained.folder / "memory", "run")


def keep(place, found, folder, name):
    """Checks what was written, and hands the trace back where it is small."""
    missing = [file for file in ("snapshot.pickle", "trace.json", "timeline.svg") if not (folder / file).exists()]
    require(not missing, f"--trace left no {', '.join(missing)}")
    trace = folder / "trace.json"
    found.figures["trace_bytes"] = trace.stat().st_size
    if place.is_gpu and place.out and trace.stat().st_size < BYTES_MAX:
        shutil.copy(trace, place.out / f"trace-{name}.json")
