"""The kernels that a step on a GPU launches, as the example step_calls lists them."""
import dataclasses
import json
import math
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]


class NotListed(Exception):
    """The example could not be built or run."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A launch: its kernel, threads a block, and bytes of shared memory a block."""
    kernel: str
    threads: int
    shared_bytes: int


def of_step(config, settings):
    """The launches of a step of a configuration with some settings changed."""
    sets = [word for each in settings for word in ("--set", each)]
    command = ["cargo", "run", "--release", "--quiet", "--example", "step_calls", "--", "--config", config, *sets]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode != 0:
        raise NotListed(f"`{' '.join(command)}` failed: {ended.stderr.strip()}")
    rows = json.loads(ended.stdout)["calls"]
    return [Call(row["kernel"], math.prod(row["block"]), row["shared_bytes"]) for row in rows if row.get("kernel")]
