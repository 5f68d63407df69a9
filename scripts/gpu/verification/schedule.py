"""Which cases `first`, `second` and `more` run, and in which order."""
from .results import HOLDS, NEVER, OPEN_AGAIN, SPEED, last, state
from .sections import rank

COMMANDS = ("first", "second", "more")
# The most that each of the first two may take, and what its start takes of that: unpacking, preflight, doctor.
SECONDS, START_SECONDS = 330, 30
# What is late of what is open again.
LATE = "late"
# Kinds of open cases, in their order within a command.
KINDS = (OPEN_AGAIN, NEVER, SPEED, LATE)
# Seconds reserved for each kind; unused ones go to the others in this order.
SHARES = {"first": {OPEN_AGAIN: 110, NEVER: 35, SPEED: 155}, "second": {OPEN_AGAIN: 10, NEVER: 10, SPEED: 280}}


def opened(cases, runs, hashes, everything=False):
    """Cases that are to be run, by kind, in their order; with `everything` also those that hold."""
    found = {kind: [] for kind in KINDS}
    for case in cases:
        kind = state(case, runs, hashes)
        if kind == HOLDS and everything:
            kind = SPEED if case.is_speed else OPEN_AGAIN
        if kind != HOLDS:
            found[LATE if kind == OPEN_AGAIN and case.is_late else kind].append(case)
    # Headlines first, and then times that nobody has taken.
    found[SPEED].sort(key=lambda case: (rank(case), last(runs, case.full) is not None))
    return found


def take(waiting, seconds):
    """The cases, from the first on, whose bounds fit into so many seconds; they no longer wait."""
    taken = []
    for case in list(waiting):
        if case.seconds <= seconds:
            taken.append(case)
            waiting.remove(case)
            seconds -= case.seconds
    return taken, seconds


def commands(found):
    """The cases of each command: within one, by kinds."""
    waiting, plan = {kind: list(cases) for kind, cases in found.items()}, {}
    for command in COMMANDS[:2]:
        left, chosen = SECONDS - START_SECONDS, {kind: [] for kind in KINDS}
        for share in (SHARES[command], dict.fromkeys(KINDS, SECONDS)):
            for kind, seconds in share.items():
                taken, unused = take(waiting[kind], min(seconds, left))
                left -= min(seconds, left) - unused
                chosen[kind] += taken
        plan[command] = [case for kind in KINDS for case in chosen[kind]]
    plan["more"] = [case for kind in KINDS for case in waiting[kind]]
    return plan


def listed(plan, runs, hashes):
    """What each command runs, a line a case."""
    lines = []
    for command, cases in plan.items():
        lines.append(f"{command}: {len(cases)} cases, {sum(case.seconds for case in cases):.0f} s at most")
        lines += [f"  {case.seconds:3.0f} s  {state(case, runs, hashes):10} {case.full}" for case in cases]
    return "\n".join(lines)
