"""The report: verification.json with everything, verification.md to read."""
import dataclasses
import json
import os

from .outcome import FAIL, NO_TIME, PASS, SKIPPED


def write(folder, head, outcomes, opened=None):
    """Writes both files, each whole or not at all. `head` says what was verified, and on what; `opened` what is open after it."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = [dict(name=outcome.name, status=outcome.status, reason=outcome.reason, seconds=round(outcome.seconds, 1), **dataclasses.asdict(outcome.findings))
             for outcome in outcomes]
    replace(folder / "verification.json", json.dumps({**head, "verdict": verdict(outcomes), "cases": cases}, indent=1) + "\n")
    replace(folder / "verification.md", markdown(head, outcomes, opened))


def replace(path, text):
    new = path.with_suffix(path.suffix + ".new")
    new.write_text(text)
    os.replace(new, path)


def verdict(outcomes):
    """A few words for all requested cases. Only checked ones pass."""
    named = lambda status: [outcome.name for outcome in outcomes if outcome.status == status]
    if named(FAIL):
        return f"failed: {', '.join(named(FAIL))}"
    if named(NO_TIME):
        return f"incomplete: no time for {len(named(NO_TIME))} of {len(outcomes)}"
    # These always run, so they count as a verification only if nothing else was requested.
    always = [name for name in ("preflight/machine", "doctor/machine") if name in named(PASS)]
    if not named(PASS) or (len(outcomes) > len(always) and named(PASS) == always):
        return "nothing was checked"
    return "passed" + (f", without {', '.join(named(SKIPPED))}" if named(SKIPPED) else "")


def markdown(head, outcomes, opened=None):
    facts = [f"- {name}: {value}" for name, value in head.items() if value and not isinstance(value, dict)]
    summary = [[outcome.name, outcome.status, f"{outcome.seconds:.0f}", "; ".join([outcome.reason, *outcome.findings.notes]).strip("; ")] for outcome in outcomes]
    lines = [f"# Verification on {head['gpu']}: {verdict(outcomes)}", "", *facts, "", *grid(["case", "result", "seconds", "remarks"], summary)]
    # One table for all cases that have one of this title.
    tables = {}
    for outcome in outcomes:
        for table in outcome.findings.tables:
            _, rows = tables.setdefault(table.title, (table.columns, []))
            rows.extend(table.rows)
    for title, (columns, rows) in tables.items():
        if rows:
            lines += ["", f"## {title}", "", *grid(columns, rows)]
    if opened:
        lines += ["", "## Open after this run", "", "```text", opened, "```"]
    return "\n".join(lines) + "\n"


def grid(columns, rows):
    """A Markdown table."""
    cell = lambda text: "-" if text is None else str(text).replace("|", "\\|").replace("\n", " ")
    line = lambda cells: "| " + " | ".join(map(cell, cells)) + " |"
    return [line(columns), "|" + "---|" * len(columns), *map(line, rows)]


def describe(outcome):
    """A line for the terminal."""
    remark = f": {outcome.reason}" if outcome.reason else ""
    return f"{outcome.name:40} {outcome.status:8} {outcome.seconds:5.0f} s{remark}"


def exit_code(outcomes):
    """0 if everything passed, or was skipped for a stated reason beside something that passed."""
    return 0 if verdict(outcomes).startswith("passed") else 1
