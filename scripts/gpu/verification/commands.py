"""Commands with a time limit: each is killed, with all that it started, when its time is up or the run is stopped."""
import json
import os
import signal
import subprocess
import threading
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
        """The error that it printed, in a line or two."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        # A panic prints where, and in the next line why.
        panics = [f"{line} {why}" for line, why in zip(lines, lines[1:]) if "panicked at" in line]
        errors = [line for line in lines if line.startswith("error") or "Error" in line]
        said = panics[:1] or errors[-1:] or lines[-1:] or ["it said nothing"]
        return f"exit code {self.code}: {said[0][:400]}"


# Running processes, and, once stopped, the reason why no more may start.
_running, _stopped, _lock = set(), [], threading.RLock()
# A process that waits for a GPU that hangs does not even end when it is killed.
SECONDS_TO_END = 10
# What a command printed is kept to this length in the list of commands, its end rather than its start.
CHARACTERS_KEPT = 4000


class CommandList:
    """A file with a line of JSON for each command that has ended, so that a failure can be read where the GPU is gone."""
    path = None

    @classmethod
    def add(cls, command, code, seconds, stdout, stderr):
        if cls.path is None:
            return
        entry = dict(command=command, code=code, seconds=round(seconds, 2), stderr=stderr[-CHARACTERS_KEPT:])
        # The output of a command that ended well is in the report.
        if code != 0:
            entry["stdout"] = stdout[-CHARACTERS_KEPT:]
        with _lock, open(cls.path, "a") as file:
            file.write(json.dumps(entry) + "\n")


def stop(reason):
    """Kills all running commands; later ones end as out of time."""
    with _lock:
        _stopped.append(reason)
        for process in _running:
            kill(process)


def stopped():
    """Why no command may start any more; none if one may."""
    return _stopped[0] if _stopped else None


def kill(process):
    """Ends a process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def run(command, clock, environment=None, folder=None):
    """Runs a command to its end.

    Raises OutOfTime, with what was printed so far in `stdout`, if the clock ends first or everything is stopped."""
    command = [str(word) for word in command]
    name = " ".join([os.path.basename(command[0]), *command[1:3], "..."])
    start = time.monotonic()
    with _lock:
        if clock.left() < 1 or stopped():
            raise OutOfTime(f"before `{name}`" + (f": {stopped()}" if stopped() else ""))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
                                   errors="replace", env={**os.environ, **(environment or {})}, cwd=folder, start_new_session=True)
        _running.add(process)
        # A signal between these two lines would have missed the process.
        if stopped():
            kill(process)
    try:
        stdout, stderr = process.communicate(timeout=max(clock.left(), 0.1))
        ended = stopped() and process.returncode == -signal.SIGKILL
    except subprocess.TimeoutExpired:
        kill(process)
        (stdout, stderr), ended = what_is_left(process), True
    finally:
        with _lock:
            _running.discard(process)
    CommandList.add(command, process.returncode, time.monotonic() - start, stdout, stderr)
    if ended:
        raise OutOfTime(f"`{name}` was stopped after {time.monotonic() - start:.0f} s" + (f": {stopped()}" if stopped() else ""), stdout)
    return Finished(command, process.returncode, stdout, stderr, time.monotonic() - start)


def what_is_left(process):
    """The output of a killed process; one that does not end is left alone."""
    try:
        return process.communicate(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        return "", ""
