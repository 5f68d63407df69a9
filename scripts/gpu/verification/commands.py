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
# The list stops growing there.
LIST_BYTES_MAX = 4_000_000


class CommandList:
    """A file with a line of JSON for each command that has ended, so that a failure can be read where the GPU is gone."""
    path = None

    @classmethod
    def add(cls, command, code, seconds, stdout, stderr):
        if cls.path is None or (cls.path.exists() and cls.path.stat().st_size > LIST_BYTES_MAX):
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


class Reader(threading.Thread):
    """Reads what a process prints, and hands each line on as it comes."""

    def __init__(self, pipe, each_line=None):
        super().__init__(daemon=True)
        self.pipe, self.each_line, self.lines = pipe, each_line, []
        self.start()

    def run(self):
        with self.pipe:
            for line in self.pipe:
                self.lines.append(line)
                if self.each_line:
                    self.each_line(line)

    def text(self):
        return "".join(list(self.lines))


def run(command, clock, environment=None, folder=None, each_line=None, meanwhile=None):
    """Runs a command to its end. `each_line` gets what it prints as it comes, `meanwhile` the process again and again until it returns true.

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
    out, err = Reader(process.stdout, each_line), Reader(process.stderr)
    try:
        while meanwhile and process.poll() is None and clock.left() > 0 and not meanwhile(process):
            time.sleep(0.02)
        process.wait(timeout=max(clock.left(), 0.1))
        # What it started may still print.
        out.join(max(clock.left(), 0.1))
        ended = out.is_alive() or (stopped() and process.returncode == -signal.SIGKILL)
    except subprocess.TimeoutExpired:
        ended = True
    except BaseException:
        kill(process)
        wait_for_the_end(process)
        raise
    finally:
        with _lock:
            _running.discard(process)
    if ended:
        kill(process)
        wait_for_the_end(process)
    for reader in (out, err):
        reader.join(SECONDS_TO_END)
    CommandList.add(command, process.returncode, time.monotonic() - start, out.text(), err.text())
    if ended:
        raise OutOfTime(f"`{name}` was stopped after {time.monotonic() - start:.0f} s" + (f": {stopped()}" if stopped() else ""), out.text())
    return Finished(command, process.returncode, out.text(), err.text(), time.monotonic() - start)


def wait_for_the_end(process):
    """Waits for a killed process; one that does not end is left alone."""
    try:
        process.wait(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        pass
