"""Runs the bundle's binaries for the sections."""
import json
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .commands import Clock, run
from .gpu import Watch
from .metrics import Metrics
from .outcome import Failed, OutOfTime, Skipped, require

# What takes the place of a model and its sizes where there is no GPU.
SMALL = {"--config": "tiny", "--seq": 128, "--micro-batch": 2, "--accum": 2}


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
    # `cuda`, `cpu`, or `stand-in`, where libraries take the driver's place.
    kind: str
    folder: pathlib.Path
    environment: dict
    peer: list
    peer_environment: dict
    clock: Clock
    # Where files go that are handed back, such as traces.
    out: pathlib.Path = None
    # The output of `doctor`, and what `kernel_times` printed, if they ran.
    doctor: dict = field(default_factory=dict)
    kernels: list = field(default_factory=list)
    _runs: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def device(self):
        return "cpu" if self.kind == "cpu" else "cuda"

    @property
    def is_cuda(self):
        return self.kind != "cpu"

    @property
    def is_gpu(self):
        return self.kind == "cuda"

    @property
    def at_a_time(self):
        """Runs that may share the device where none is timed. They also disturb each other, which must change no bit."""
        return 4 if self.is_gpu else 1

    def gpu(self):
        """What `doctor` says of the first GPU; nothing on other devices."""
        return next(iter(self.doctor.get("gpus", [])), {})

    def file(self, name):
        return self.folder / name

    def new_folder(self):
        with self._lock:
            self._runs += 1
            return self.folder / f"run-{self._runs}"

    def prepared(self, name):
        """A file that the bundle's build computed, since it needs no GPU."""
        path = self.bundle / "prepared" / name
        require(path.exists(), f"the bundle has no prepared/{name}: scripts/gpu/build computes it")
        return path

    def need_gpu(self, why, *flags):
        """Ends the case without a GPU; a plan has to accept the flags of its run all the same."""
        if not self.is_gpu:
            if flags:
                self.plan(*flags, device="cuda")
            raise Skipped(f"{why} needs a GPU")

    def sized(self, *flags):
        """These flags on a GPU. Elsewhere a plan has to accept them, and the smallest model takes the place of theirs."""
        if self.is_gpu:
            return list(flags)
        self.plan(*flags, device="cuda")
        given = [pair for pair in zip(flags[::2], flags[1::2]) if pair[0] not in SMALL and pair[0] != "--data" and "model.layers" not in str(pair[1])]
        return [word for pair in [*SMALL.items(), *given] for word in pair]

    def trainer(self, *arguments, **more):
        """Runs the trainer with any command."""
        return run([self.bundle / "trainer", *arguments], self.clock, self.environment, **more)

    def plan(self, *arguments, device=None):
        """The plan of a run with these arguments."""
        finished = self.trainer("plan", "--json", "--device", device or self.device, *arguments)
        require(finished.code == 0, f"`trainer plan {' '.join(map(str, arguments))}`: {finished.complaint()}")
        return json.loads(finished.stdout)

    def try_training(self, *arguments, device=None, out=None, **more):
        """Trains on the device, or on another one; it may fail."""
        folder = out or self.new_folder()
        finished = self.trainer("train", "--device", device or self.device, "--quiet", "--save-every", 0, "--out", folder, *arguments, **more)
        read = lambda name: (folder / name).read_text() if (folder / name).exists() else None
        metrics = Metrics.parse(read("metrics.jsonl") or "")
        return Trained(finished, folder, metrics, json.loads(read("plan.json") or "{}"))

    def train_watched(self, *arguments):
        """As `train`, and what the GPU's clock and power were meanwhile."""
        with Watch() as watch:
            trained = self.train(*arguments)
        return trained, watch

    def train(self, *arguments, device=None, **more):
        """Trains on the device, or on another one; every step must have been made there, and be finite."""
        device = device or self.device
        trained = self.try_training(*arguments, device=device, **more)
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
