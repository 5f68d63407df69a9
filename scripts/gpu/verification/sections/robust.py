"""What happens to a run from outside: another process takes the rest of the card, a signal comes in the middle of a step."""
import os
import signal
import subprocess
import sys

from ..case import MEMORY, STREAMS
from ..outcome import require

OTHERS, SIGTERM = "another process takes the rest of the card", "SIGTERM in a step"
CASES = {OTHERS: 20, SIGTERM: 15}

# When it is told to, takes what the first GPU has left by plain allocations, and holds it until its standard input is closed.
HOG = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *words):
    return getattr(cuda, name)(*words)
context, block, held, size = ctypes.c_void_p(), ctypes.c_uint64(), 0, 1 << 33
assert call("cuInit", 0) == call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0) == call("cuCtxSetCurrent", context) == 0
print("ready", flush=True)
sys.stdin.readline()
while size >= 1 << 24:
    if call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(size)) == 0:
        held += size
    else:
        size //= 2
print(held, flush=True)
sys.stdin.read()
"""


def sources(_case):
    return (*MEMORY, *STREAMS)


def run(place, found, case):
    (beside_another if case == OTHERS else interrupted)(place, found)


def steps_in(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"kind":"step"') if path.exists() else 0


def beside_another(place, found):
    place.need_gpu("a card that is taken")
    flags, out = ["--config", "llama-15m", "--dtype", "bf16", "--steps", 200], place.file("beside another")
    alone = place.train(*flags)
    # It ends when its input is closed, also if this process is killed.
    with subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **place.environment}) as hog:
        require(hog.stdout.readline().strip() == "ready", "the other process has no context on the GPU")

        def take(_process):
            if steps_in(out) < 3:
                return False
            hog.stdin.write("go\n")
            hog.stdin.flush()
            found.figures.update(taken_bytes=int(hog.stdout.readline() or 0), steps_before=steps_in(out))
            return True

        trained = place.train(*flags, out=out, meanwhile=take)
        hog.stdin.close()
    require(found.figures.get("taken_bytes", 0) > 0, "the other process took nothing")
    require(found.figures["steps_before"] < len(trained.metrics.steps), "the run had ended before")
    require(trained.metrics.bits() == alone.metrics.bits(), "the run has other bits than alone")


def interrupted(place, found):
    model = ["--config", "llama-15m" if place.is_gpu else "tiny", "--accum", 40, "--steps", 3, "--set", "lr.schedule=constant"]
    whole, out = place.train(*model), place.file("interrupted")

    def end(process):
        if steps_in(out) < 1:
            return False
        os.kill(process.pid, signal.SIGTERM)
        return True

    broken = place.try_training(*model, out=out, meanwhile=end)
    require(broken.finished.code == 143, f"SIGTERM in a step: exit code {broken.finished.code}, not 143: {broken.finished.complaint()}")
    found.figures["steps_before"] = len(broken.metrics.steps)
    resumed = place.try_training("--resume", "latest", out=out)
    require(resumed.finished.code == 0, f"the resumed run: {resumed.finished.complaint()}")
    require(resumed.metrics.bits() == whole.metrics.bits(), "the resumed run has other bits than one that went on")
