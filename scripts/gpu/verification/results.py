"""Results of runs on GPUs: a file a run, and what they say of each case."""
import json
import pathlib
import re

from .outcome import FAIL, PASS

# States of a case. It is open again if its sources changed since it passed, or if it failed.
OPEN_AGAIN, NEVER, SPEED, HOLDS = "open again", "never run", "speed", "holds"
# A result keeps so many figures of a case; the report has all.
FIGURES_MAX = 30


def load(folder):
    """The runs on GPUs that a folder has, the earliest first."""
    runs = [json.loads(path.read_text()) | dict(file=path.name) for path in sorted(pathlib.Path(folder).glob("*.json"))]
    return sorted((run for run in runs if run["device"] == "cuda"), key=lambda run: run["date"])


def last(runs, full):
    """The newest result of a case that says something, and its run; none where no run has one."""
    for run in reversed(runs):
        record = run["cases"].get(full)
        if record and record["status"] in (PASS, FAIL):
            return record, run
    return None


def state(case, runs, hashes):
    """Whether a case holds for these sources, has to be shown anew, or was never run."""
    known = last(runs, case.full)
    if known and known[0]["status"] == PASS and known[0].get("sources") == hashes[case.full]:
        return HOLDS
    return SPEED if case.is_speed else OPEN_AGAIN if known else NEVER


def record(outcome, sources):
    """The result of a case, as a run's file has it."""
    figures = {name: value for name, value in outcome.findings.figures.items() if isinstance(value, (int, float, str))}
    kept = dict(status=outcome.status, seconds=round(outcome.seconds, 1), sources=sources, reason=outcome.reason[:300],
                figures=dict(list(figures.items())[:FIGURES_MAX]), notes=[note[:200] for note in outcome.findings.notes[:3]])
    return {name: value for name, value in kept.items() if value not in ("", {}, [])}


def file_name(date, device_name, commit, command):
    """Such as `2026-11-27-h200-18d8fd73-first-0915.json`."""
    card = re.sub(r"[^a-z0-9]+", "-", device_name.lower().replace("nvidia", "").strip()).strip("-")
    return f"{date[:10]}-{card}-{commit[:8]}-{command}-{date[11:16].replace(':', '')}.json"
