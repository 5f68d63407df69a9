"""The GPU that CUDA gives a program, asked by nvidia-smi."""
import os
import statistics
import subprocess

from .outcome import Failed

SECONDS_TO_END = 5


def selected():
    """The index or UUID of the GPU that CUDA_VISIBLE_DEVICES gives first; without it the first."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return "0"
    first = named.split(",")[0].strip()
    if first in ("", "-1", "NoDevFiles"):
        raise Failed(f"CUDA_VISIBLE_DEVICES={named} hides every GPU")
    return first


def query(fields, seconds=20):
    """What nvidia-smi says of fields of this GPU; none where it does not know one of them, or is not there."""
    try:
        command = ["nvidia-smi", "-i", selected(), f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired, Failed):
        return None
    text = said.stdout.strip()
    return text if said.returncode == 0 and text and not text.startswith("[") else None


class Watch:
    """Clock and power of the GPU while something runs: medians of samples in which it was busy."""

    def __enter__(self):
        self.sm_mhz = self.watts = None
        command = ["nvidia-smi", "-i", selected(), "--query-gpu=clocks.sm,power.draw,utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self.process = None
        return self

    def __exit__(self, *_):
        if self.process is None:
            return
        # One that waits for a GPU that hangs may not end even when it is killed: it is left alone.
        for end in (self.process.terminate, self.process.kill):
            end()
            try:
                self.sm_mhz, self.watts = medians(self.process.communicate(timeout=SECONDS_TO_END)[0])
                return
            except subprocess.TimeoutExpired:
                continue

    def figures(self):
        return dict(sm_mhz=self.sm_mhz, watts=self.watts)


def medians(said):
    """Median clock and power of the lines that name a busy GPU; none of a figure that no line has."""
    rows = [[number(cell) for cell in line.split(",")] for line in said.splitlines() if line.count(",") == 2]
    columns = zip(*[(clock, power) for clock, power, use in rows if use is not None and use > 50])
    known = [[value for value in column if value is not None] for column in columns] or [[], []]
    return tuple(statistics.median(values) if values else None for values in known)


def number(cell):
    """What nvidia-smi says of a figure; none for `[N/A]`."""
    try:
        return float(cell)
    except ValueError:
        return None
