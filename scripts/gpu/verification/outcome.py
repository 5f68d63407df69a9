"""The outcome of a case, and what it has found."""
from dataclasses import dataclass, field

PASS, FAIL, SKIPPED, NO_TIME = "pass", "FAIL", "skipped", "no time"


class Failed(Exception):
    """A check failed."""


class Skipped(Exception):
    """The case cannot run here, for a reason that is not the trainer's fault."""


class OutOfTime(Exception):
    """The budget ended first: nothing is known about what was left."""

    def __init__(self, reason, stdout=""):
        super().__init__(reason)
        # What a stopped command had printed.
        self.stdout = stdout


def require(holds, reason):
    """Ends the case unless something holds."""
    if not holds:
        raise Failed(reason)


@dataclass
class Table:
    """A table of a report; every cell is text already."""
    title: str
    columns: list
    rows: list = field(default_factory=list)


@dataclass
class Findings:
    """What a case has found, kept however it ends."""
    figures: dict = field(default_factory=dict)
    tables: list = field(default_factory=list)
    notes: list = field(default_factory=list)

    def table(self, title, *columns):
        """A new table, to which rows are added as they become known."""
        table = Table(title, list(columns))
        self.tables.append(table)
        return table.rows


@dataclass
class Outcome:
    """How a case ended."""
    name: str
    status: str
    reason: str
    seconds: float
    findings: Findings
