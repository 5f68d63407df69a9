"""Trains transformers, and knows their memory to the byte before.

In this process, with your own batches: `Trainer`.

    import trainer
    with trainer.Trainer(config="tiny", seq=64) as model:
        model.step(input_ids, labels)

As the command `trainer`, of which these return what it prints, as dictionaries: `plan`, `bench`, `check`.

    plan = trainer.plan(config="llama-3-8b", recompute="full", seq=8192)
    print(plan["peak_bytes"])

Positional arguments are passed as they are. Keywords are flags: `micro_batch=2` is `--micro-batch 2`, `pareto=True` is
`--pareto`, `set=["a.b=1", "c.d=2"]` is given once for each value, and None or False is left out. What the dictionaries hold
is described by `schema(NAME)`.
"""
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from . import _trainer
from ._errors import OutOfMemory, TrainerError, UsageError
from ._flags import flags_of
from ._model import Trainer

Weight = _trainer.Weight

__all__ = ["OutOfMemory", "Trainer", "TrainerError", "UsageError", "Weight", "bench", "binary", "check", "plan", "schema"]

# Kernels are tried in a process of their own; within a program that has no interpreter to start, they are not.
if sys.executable:
    _trainer.is_within([sys.executable, str(Path(__file__).with_name("__main__.py"))])

# `check` ends with it where a peak grew, `bench` where peaks have changed.
CHECK_FAILED = 1
# `plan` ends with it where the run does not fit what it was asked about.
DOES_NOT_FIT = 3


def binary():
    """The path of the program: beside this package, or else on the PATH."""
    installed = Path(__file__).resolve().parent.parent
    folders = [Path(sysconfig.get_path("scripts")), *(above / "bin" for above in [installed, *list(installed.parents)[2:3]])]
    for folder in folders:
        if os.access(folder / "trainer", os.X_OK):
            return str(folder / "trainer")
    found = shutil.which("trainer")
    if found is None:
        raise TrainerError(f"the program `trainer` is neither in {folders[0]} nor on the PATH: install the package anew", None)
    return found


def plan(*arguments, **flags):
    """What a run would need, to the byte: `trainer plan --json`.

    A plan that does not fit `memory_limit`, `largest` or `device_memory` is returned too: its figures say so.
    """
    return _called("plan", arguments, flags, DOES_NOT_FIT)


def bench(*arguments, **flags):
    """Strategies side by side: `trainer bench --json`. Changed peaks, under `check=FILE`, are an error with a `result`."""
    return _called("bench", arguments, flags)


def check(base, new, *arguments, **flags):
    """Compares two peaks: `trainer check BASE NEW --json`. `["grew"]` says whether the second is higher than is tolerated.

    A device that only one of the files recorded is an error, with a `result`.
    """
    return _called("check", [base, new, *arguments], flags, CHECK_FAILED)


def schema(name):
    """The JSON Schema of `plan`, `metrics`, `bench`, `check` or `oom`."""
    return json.loads(_output(["schema", name]))


def _called(command, arguments, flags, answer=0):
    """What a command prints. With the exit code `answer` that is a result too."""
    try:
        return json.loads(_output([command, *map(str, arguments), "--json", *flags_of(flags)]))
    except TrainerError as error:
        if error.exit_code == answer and error.result is not None:
            return error.result
        raise


def _output(words):
    done = subprocess.run([binary(), *words], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8")
    if done.returncode == 0:
        return done.stdout
    begin = done.stderr.find("error: ")
    message = done.stderr[max(begin, 0):].strip()
    try:
        result = json.loads(done.stdout)
    except ValueError:
        result = None
    raise TrainerError(message or f"trainer {words[0]} ended with {done.returncode}", done.returncode, result)
