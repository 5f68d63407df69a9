"""What happens to a run from outside: another process takes the rest of the card, a signal comes in the middle of a step."""
import contextlib
import os
import signal
import subprocess
import sys
import time

from ..case import MEMORY, STREAMS
from ..commands import Reader, wait_for_the_end
from ..outcome import Skipped, require

OTHERS, SIGTERM = "another process takes the rest of the card", "SIGTERM in a step"
CASES = {OTHERS: 40, SIGTERM: 15}

# When it is told to, takes what the first GPU has left by plain allocations, and holds it until its standard input is closed, also because this process was killed.
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
    # Many short steps, so that the run goes on while the card fills.
    flags, out = ["--config", "llama-15m", "--dtype", "bf16", "--seq", 256, "--micro-batch", 1, "--accum", 1, "--steps", 2000], place.file("beside another")
    alone = place.train(*flags)
    hog = subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **place.environment})
    try:
        said = Reader(hog.stdout)
        while not said.lines and hog.poll() is None and place.clock.left() > 0:
            time.sleep(0.02)
        require(said.lines == ["ready\n"], "the other process has no context on the GPU")
        trained = place.train(*flags, out=out, meanwhile=Take(hog, said, out, found))
    finally:
        hog.kill()
        wait_for_the_end(hog)
        # Bytes that nobody took are no error.
        with contextlib.suppress(OSError):
            hog.stdin.close()
    judge(trained, alone, found.figures)


class Take:
    """Tells the other process in step 3 to take the card, and is done when it has. Never waits, so that the case's clock holds."""

    def __init__(self, hog, said, out, found):
        self.hog, self.said, self.out, self.found, self.is_told = hog, said, out, found, False

    def __call__(self, _process):
        if not self.is_told and steps_in(self.out) >= 3:
            self.hog.stdin.write("go\n")
            self.hog.stdin.flush()
            self.is_told = True
        if len(self.said.lines) < 2:
            return False
        self.found.figures.update(taken_bytes=int(self.said.lines[1]), steps_before=steps_in(self.out))
        return True


def judge(trained, alone, figures):
    if figures.get("steps_before", len(trained.metrics.steps)) >= len(trained.metrics.steps):
        raise Skipped("the run had ended before the other process had taken the card")
    require(figures["taken_bytes"] > 0, "the other process took nothing")
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
