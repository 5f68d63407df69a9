"""Runs the bundle's binaries for the sections."""
import json
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .commands import Clock, run
from .metrics import Metrics
from .outcome import Failed, OutOfTime, require


@dataclass
class Trained:
    """A run of `trainer train`, however it ended."""
    finished: object
    folder: pathlib.Path
    metrics: Metrics
    plan: dict

    def json(self, name):
        return json.loads((self.folder / name).read_text())


@dataclass
class Workplace:
    """Where the bundle is, on which device its binaries run, and how much time there is."""
    bundle: pathlib.Path
    manifest: dict
    device: str
    folder: pathlib.Path
    environment: dict
    peer: list
    peer_environment: dict
    clock: Clock
    # The output of `doctor` and of the driver's own tool, if they ran.
    doctor: dict = field(default_factory=dict)
    nvidia_smi: str = ""
    _runs: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_cuda(self):
        return self.device == "cuda"

    @property
    def at_a_time(self):
        """Runs that may share the device where none is timed. They also disturb each other, which must change no bit."""
        return 4 if self.is_cuda else 1

    def gpu(self):
        """What `doctor` says of the first GPU; nothing on other devices."""
        return next(iter(self.doctor.get("gpus", [])), {})

    def file(self, name):
        return self.folder / name

    def new_folder(self):
        with self._lock:
            self._runs += 1
            return self.folder / f"run-{self._runs}"

    def trainer(self, *arguments):
        """Runs the trainer with any command."""
        return run([self.bundle / "trainer", *arguments], self.clock, self.environment)

    def plan(self, *arguments):
        """The plan of a run with these arguments."""
        finished = self.trainer("plan", "--json", "--device", self.device, *arguments)
        require(finished.code == 0, f"`trainer plan {' '.join(map(str, arguments))}`: {finished.complaint()}")
        return json.loads(finished.stdout)

    def try_training(self, *arguments, device=None):
        """Trains on the device, or on another one; it may fail."""
        folder = self.new_folder()
        finished = self.trainer("train", "--device", device or self.device, "--quiet", "--save-every", 0, "--out", folder, *arguments)
        read = lambda name: (folder / name).read_text() if (folder / name).exists() else None
        metrics = Metrics.parse(read("metrics.jsonl") or "")
        return Trained(finished, folder, metrics, json.loads(read("plan.json") or "{}"))

    def train(self, *arguments, device=None):
        """Trains on the device, or on another one; every step must have been made there, and be finite."""
        device = device or self.device
        trained = self.try_training(*arguments, device=device)
        command = f"`trainer train {' '.join(map(str, arguments))}`"
        require(trained.finished.code == 0, f"{command}: {trained.finished.complaint()}")
        metrics = trained.metrics
        used = metrics.header.get("device", "nothing")
        require(used.partition(":")[0] == device, f"{command} ran on {used}, not on {device}")
        require(metrics.steps and metrics.end.get("reason") == "done", f"{command} has no steps, or no end")
        require(metrics.is_finite(), f"{command}: a step is not finite")
        return trained

    def train_all(self, commands):
        """Trains with each list of arguments, several at a time; results in the same order. Stops at the first failure."""
        stop = threading.Event()

        def work(arguments):
            if stop.is_set():
                raise OutOfTime("not started: a run before it did not end well")
            try:
                return self.train(*arguments)
            except (Failed, OutOfTime):
                stop.set()
                raise

        with ThreadPoolExecutor(self.at_a_time) as pool:
            pending = [pool.submit(work, arguments) for arguments in commands]
            problems = [one.exception() for one in pending if one.exception()]
        # Raise the cause, not the errors of runs that did not start because of it.
        for kind in (Failed, Exception):
            for problem in problems:
                if isinstance(problem, kind):
                    raise problem
        return [one.result() for one in pending]
