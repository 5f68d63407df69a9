"""Commands with an end: each is killed, with everything that it started, when its time is up."""
import os
import signal
import subprocess
import time
from dataclasses import dataclass

from .outcome import OutOfTime


class Clock:
    """Counts down from a number of seconds."""

    def __init__(self, seconds):
        self.start = time.monotonic()
        self.end = self.start + seconds

    def left(self):
        return self.end - time.monotonic()

    def spent(self):
        return time.monotonic() - self.start

    def within(self, seconds):
        """A clock that ends after so many seconds, or with this one."""
        return Clock(min(seconds, self.left()))


@dataclass
class Finished:
    """A command that has ended by itself."""
    command: list
    code: int
    stdout: str
    stderr: str
    seconds: float

    def complaint(self):
        """What it said went wrong, in a line or two."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        # A panic says where, and in the next line why.
        panics = [f"{line} {why}" for line, why in zip(lines, lines[1:]) if "panicked at" in line]
        errors = [line for line in lines if line.startswith("error") or "Error" in line]
        said = panics[:1] or errors[-1:] or lines[-1:] or ["it said nothing"]
        return f"exit code {self.code}: {said[0][:400]}"


def run(command, clock, environment=None, folder=None):
    """Runs a command to its end.

    Raises OutOfTime, with what was printed so far in `stdout`, if the clock ends first."""
    command = [str(word) for word in command]
    name = " ".join([os.path.basename(command[0]), *command[1:3], "..."])
    if clock.left() < 1:
        raise OutOfTime(f"before `{name}`")
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
                               errors="replace", env={**os.environ, **(environment or {})}, cwd=folder, start_new_session=True)
    try:
        stdout, stderr = process.communicate(timeout=max(clock.left(), 0.1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, _ = process.communicate()
        ended = OutOfTime(f"`{name}` was stopped after {time.monotonic() - start:.0f} s")
        ended.stdout = stdout
        raise ended from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return Finished(command, process.returncode, stdout, stderr, time.monotonic() - start)
