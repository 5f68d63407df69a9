"""The report: verification.json with everything, verification.md to read."""
import dataclasses
import json
import os

from .outcome import FAIL, NO_TIME, PASS, SKIPPED, Findings, Outcome, Table


def write(folder, head, outcomes):
    """Writes both files, each whole or not at all. `head` says what was verified, and on what."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = [dict(name=outcome.name, checks=outcome.checks, status=outcome.status, reason=outcome.reason,
                     seconds=round(outcome.seconds, 1), **dataclasses.asdict(outcome.findings))
                for outcome in outcomes]
    replace(folder / "verification.json", json.dumps({**head, "verdict": verdict(outcomes), "sections": sections}, indent=1) + "\n")
    replace(folder / "verification.md", markdown(head, outcomes))


def replace(path, text):
    new = path.with_suffix(path.suffix + ".new")
    new.write_text(text)
    os.replace(new, path)


def read(folder):
    """The head of an earlier report, and its outcomes by name."""
    head = json.loads((folder / "verification.json").read_text())
    outcomes = {}
    for section in head.pop("sections"):
        tables = [Table(**table) for table in section["tables"]]
        found = Findings(section["figures"], tables, section["notes"])
        outcomes[section["name"]] = Outcome(*(section[key] for key in ("name", "checks", "status", "reason", "seconds")), found)
    return head, outcomes


def verdict(outcomes):
    """A few words for all requested sections. Only checked ones pass."""
    named = lambda status: [outcome.name for outcome in outcomes if outcome.status == status]
    if named(FAIL):
        return "failed"
    if named(NO_TIME):
        return "incomplete"
    # These always run, so they count as a verification only if no other section was requested.
    always = [name for name in ("preflight", "doctor") if name in named(PASS)]
    if not named(PASS) or (len(outcomes) > len(always) and named(PASS) == always):
        return "nothing was checked"
    return "passed" + (f", without {', '.join(named(SKIPPED))}" if named(SKIPPED) else "")


def markdown(head, outcomes):
    facts = [f"- {name}: {value}" for name, value in head.items() if value and name != "device_name" and not isinstance(value, dict)]
    summary = [[outcome.name, outcome.status, f"{outcome.seconds:.0f}", outcome.checks, "; ".join([outcome.reason, *outcome.findings.notes])
                .strip("; ")] for outcome in outcomes]
    lines = [f"# Verification on {head['device_name']}: {verdict(outcomes)}", "", *facts, "",
             *grid(["section", "result", "seconds", "what it checks", "remarks"], summary)]
    for outcome in outcomes:
        for table in outcome.findings.tables:
            if table.rows:
                lines += ["", f"## {outcome.name}: {table.title}", "", *grid(table.columns, table.rows)]
    return "\n".join(lines) + "\n"


def grid(columns, rows):
    """A Markdown table."""
    cell = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    line = lambda cells: "| " + " | ".join(map(cell, cells)) + " |"
    return [line(columns), "|" + "---|" * len(columns), *map(line, rows)]


def describe(outcome):
    """A line for the terminal."""
    remark = f": {outcome.reason}" if outcome.reason else ""
    return f"{outcome.name:12} {outcome.status:8} {outcome.seconds:5.0f} s{remark}"


def exit_code(outcomes):
    """0 if everything passed, or was skipped for a stated reason beside something that passed."""
    return 0 if verdict(outcomes).startswith("passed") else 1
