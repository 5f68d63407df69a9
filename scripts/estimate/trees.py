"""A source tree to estimate: its machine code, and the calls of its steps."""
import dataclasses
import functools
import pathlib

from . import calls, code, step
from .workloads import WORKLOADS

READ_COMMIT = "c5abdaf"
# The calls of its steps, written by hand, since the example step_calls came later.
READ_LISTINGS = pathlib.Path(__file__).parent / f"{READ_COMMIT}.json"
RECOMPUTED = "recompute.spec=mlp_act"


# Compared by identity, since estimates are cached by tree.
@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    title: str
    # By a workload's name and settings beside its own.
    listings: dict
    kernels: code.Kernels


def of_kernels(title, listings, folder):
    """A tree with the machine code of the kernels that its listings name, from a folder of sources."""
    sources = {call.kernel: call.source for each in listings.values() for call in each.calls if call.kernel}
    return Tree(title, listings, code.kernels_of(folder, sources))


def read_commit(names, root, folder):
    """The commit of the close reading, whose sources go into a folder."""
    listings = {(name, ()): calls.of_file(READ_LISTINGS, name) for name in names}
    return of_kernels(READ_COMMIT, listings, code.extracted(READ_COMMIT, root, folder))


def working_tree(names, root):
    """This tree, with what a step asks for when SwiGLU is recomputed, too."""
    listings = {(name, more): calls.parsed(calls.written(WORKLOADS[name].preset, [*WORKLOADS[name].settings, *more]))
                for name in names for more in ((), (RECOMPUTED,))}
    return of_kernels("working tree", listings, root / "kernels")


@functools.cache
def estimate(tree, name, *more, **by):
    """A step of a workload, with settings beside its own, by other means than our own: see `step.step_of`."""
    return step.step_of(tree.listings[name, more], tree.kernels, **by)


# The changes since the close reading, part by part: a title, and the calls that each changed.
PARTS = [
    ("attention of our own", lambda timed: timed.source == "flash_attention"),
    ("the head's chunk, and its kernels", lambda timed: timed.row == step.HEAD),
    ("q k v and gate up in one, bias in the product",
     lambda timed: timed.row == step.PRODUCTS or timed.source in ("swiglu", "rotary", "qkv", "elementwise")),
    ("reductions, alignment, AdamW", lambda timed: True),
]


def steps_between(before, after):
    """Steps from one to the other, a part's calls at a time, each with the title of what is new in it."""
    left, coming, brought = before.timed, [dataclasses.replace(each, in_graph=False) for each in after.timed], []
    for title, is_of_part in PARTS:
        brought += [each for each in coming if is_of_part(each)]
        left, coming = ([each for each in some if not is_of_part(each)] for some in (left, coming))
        yield title, dataclasses.replace(after, timed=(*left, *brought))
    yield "micro-batches as graphs", after
