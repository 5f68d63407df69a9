"""The blessed figures, kernel by kernel, and how they have changed."""
import dataclasses
import json

from .figures import Figures, Pass, compared


class Unreadable(Exception):
    """The budget is not what `written` writes."""


@dataclasses.dataclass(frozen=True)
class Budget:
    # Its version, "12.9": figures of different compilers say nothing about each other.
    compiler: str
    # By target and name of the kernel.
    figures: dict[tuple[int, str], Figures]


@dataclasses.dataclass(frozen=True)
class Change:
    """A changed figure, as a sentence."""
    is_worse: bool
    sentence: str


def written(budget):
    """A budget as text, a kernel a line."""
    rows = [json.dumps({"target": target, "kernel": name} | dataclasses.asdict(figures))
            for (target, name), figures in sorted(budget.figures.items())]
    return f'{{"compiler": "{budget.compiler}", "kernels": [\n' + ",\n".join(rows) + "\n]}\n"


def read(text):
    try:
        found, figures = json.loads(text), {}
        for row in found["kernels"]:
            key = row.pop("target"), row.pop("kernel")
            passes = tuple(Pass(**each) for each in row.pop("passes"))
            figures[key] = Figures(**row, passes=passes)
        return Budget(found["compiler"], figures)
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"the budget is not one ({error!r}): --bless writes it anew") from error


def shown(value):
    """A figure for people. Figures of which more is better are compared as negative numbers."""
    value = abs(value)
    return str(int(value)) if value == int(value) else f"{float(value):.2f}"


def changes_of(key, before, now):
    """What is new in a kernel."""
    target, name = key
    kernel = f"{name} for sm_{target}"
    if before is None:
        return [Change(True, f"{kernel} is not in the budget")]
    if now is None:
        return [Change(True, f"{kernel} is in the budget, and in none of the files")]
    if len(before.passes) != len(now.passes):
        sentence = f"{kernel}: {len(now.passes)} loops over tensors, {len(before.passes)} before, so they cannot be compared"
        return [Change(True, sentence)]
    old, new = compared(before), compared(now)
    # A loop of another kind has figures of another name: with and without products.
    return [Change(new.get(figure, old[figure] + 1) > old[figure],
                   f"{kernel}: {figure}: {shown(old[figure])} before, {shown(new[figure]) if figure in new else 'none'} now")
            for figure in old if new.get(figure) != old[figure]]


def changes(budget, found):
    keys = sorted(budget.figures.keys() | found.keys())
    return [change for key in keys for change in changes_of(key, budget.figures.get(key), found.get(key))]
