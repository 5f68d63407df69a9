"""The calls of a step on a GPU: for this tree from its own launch code (the example step_calls), for c5abdaf from a file."""
import dataclasses
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]


class NotListed(Exception):
    """The example could not be built or run."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the device, as the example writes it: a kernel of our own, a product, or a call timed by its bytes."""
    operation: str
    times: float
    layer: str = "block"
    phase: str = ""
    in_graph: bool = False
    # Of the operation, with the first of its calls.
    flops: int = 0
    bytes: int = 0
    kernel: str | None = None
    source: str | None = None
    grid: tuple = (1, 1, 1)
    block: tuple = (32, 1, 1)
    shared_bytes: int = 0
    # Arguments that are whole numbers, in their order.
    numbers: tuple = ()
    product: dict | None = None
    cleared: int | None = None
    # Wide loads of a warp's loops: given only in the file, since its kernels were others.
    loads: float | None = None

    @property
    def blocks(self):
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self):
        return self.block[0] * self.block[1] * self.block[2]


@dataclasses.dataclass(frozen=True)
class Listing:
    """A step: the calls of a micro-batch, with its share of those made once a step."""
    tokens: int
    head_chunk: int
    calls: tuple


def parsed(written):
    """A listing, from the example's output, which counts the calls of a whole step."""
    micro_batches = written["micro_batches"]
    calls = (Call(**row | {"times": row["times"] / micro_batches}) for row in written["calls"])
    return Listing(written["tokens"], written["head_chunk"], tuple(calls))


def written(config, settings):
    """The example's output for a configuration with some settings changed."""
    sets = [word for each in settings for word in ("--set", each)]
    command = ["cargo", "run", "--release", "--quiet", "--example", "step_calls", "--", "--config", config, *sets]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode != 0:
        raise NotListed(f"`{' '.join(command)}` failed: {ended.stderr.strip()}")
    return json.loads(ended.stdout)


def of_file(path, name):
    """A workload of a file of listings."""
    return parsed(json.loads(path.read_text())[name])
