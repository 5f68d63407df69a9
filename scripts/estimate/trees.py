"""A tree that is judged: its machine code, and what its launch code does by default."""
import dataclasses
import pathlib
import tomllib

from . import code, step
from .launches import SOURCES

CHUNKS = (512, 1024, 2048, 4096, 8192)
# The smallest chunk whose step takes no more than this beyond the best's: `memory.head_chunk = "auto"`.
CHUNK_TOLERANCE = 0.005


@dataclasses.dataclass(frozen=True)
class Tree:
    title: str
    kernels: dict
    # None: chosen for each workload.
    head_chunk: int | None
    graphs: bool


def read(commit, root, folder):
    """A commit, or the working tree if none is named."""
    home = code.extracted(commit, root, folder)
    names = {name for kernels in SOURCES.values() for name in kernels}
    sources = [source for source in SOURCES if (home / "kernels" / f"{source}.cu").exists()]
    kernels = code.kernels_of(home / "kernels", sources, lambda name: name in names)
    defaults = tomllib.loads((home / "configs" / "reference.toml").read_text())
    chunk = defaults["memory"]["head_chunk"]
    return Tree(commit or "working tree", kernels, None if chunk == "auto" else chunk,
                defaults["train"].get("graphs", "off") != "off")


def estimate(tree, workload, **settings):
    """A step of a tree, with its own defaults but for what is given."""
    settings = {"graphs": tree.graphs, **settings}
    chunk = settings.pop("head_chunk", tree.head_chunk)
    chunks = [chunk] if chunk else [each for each in CHUNKS if each <= workload.tokens]
    steps = [step.Step(workload, tree.kernels, step.Settings(head_chunk=each, **settings)) for each in chunks]
    best = min(each.ms() for each in steps)
    return next(each for each in steps if each.ms() <= best * (1 + CHUNK_TOLERANCE))


# What was done about the first run, part by part: a title, kernels of the later tree that it brought, and settings of the later tree.
PARTS = [
    ("attention of our own", "flash_attention", ()),
    ("q k v and gate up in one, bias in the product", "products", ()),
    ("reductions, alignment, AdamW", "reductions", ()),
    ("the head's chunk", None, ("head_chunk",)),
    ("micro-batches as graphs", None, ("graphs",)),
]
# Sources whose kernels come with a part; all others are reductions.
FAMILIES = {"flash_attention": "flash_attention", "swiglu": "products", "rotary": "products", "qkv": "products"}


def family_of(name):
    """The part that a kernel came with."""
    source = next(source for source, kernels in SOURCES.items() if name in kernels)
    return FAMILIES.get(source, "reductions")


def steps_between(before, after):
    """Trees from one to the other, a part at a time, each with the title of what is new in it."""
    now = before
    for title, family, settings in PARTS:
        if family:
            kept = [(name, each) for name, each in now.kernels.items() if family_of(name) != family]
            brought = [(name, each) for name, each in after.kernels.items() if family_of(name) == family]
            now = dataclasses.replace(now, kernels=code.Kernels(kept + brought))
        now = dataclasses.replace(now, **{name: getattr(after, name) for name in settings})
        yield title, now
