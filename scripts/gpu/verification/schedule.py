"""Which cases `first`, `second` and `more` run, and in which order."""
from .results import CHANGED, HOLDS, NEVER, SPEED, last, state

COMMANDS = ("first", "second", "more")
# The most that each of the first two may take, and what its start takes of that: unpacking, preflight, doctor.
SECONDS, START_SECONDS = 330, 30
# What each kind of open case is sure of in a command. What one leaves goes to the others, in this order.
SHARES = {CHANGED: 85, NEVER: 80, SPEED: 135}


def opened(cases, runs, hashes, everything=False):
    """Cases that are to be run, by kind, in their order; with `everything` also those that hold."""
    found = {kind: [] for kind in SHARES}
    for case in cases:
        kind = state(case, runs, hashes)
        if kind == HOLDS and everything:
            kind = SPEED if case.is_speed else CHANGED
        if kind != HOLDS:
            found[kind].append(case)
    # Times that nobody has taken come before those that are taken anew.
    found[SPEED].sort(key=lambda case: last(runs, case.full) is not None)
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
    """The cases of each command. Within one, what changed comes first, then what was never run, then speed."""
    waiting, plan = {kind: list(cases) for kind, cases in found.items()}, {}
    for command in COMMANDS[:2]:
        left, chosen = SECONDS - START_SECONDS, {kind: [] for kind in SHARES}
        for share in (SHARES, dict.fromkeys(SHARES, SECONDS)):
            for kind, seconds in share.items():
                taken, unused = take(waiting[kind], min(seconds, left))
                left -= min(seconds, left) - unused
                chosen[kind] += taken
        plan[command] = [case for kind in SHARES for case in chosen[kind]]
    plan["more"] = [case for kind in SHARES for case in waiting[kind]]
    return plan


def listed(plan, runs, hashes):
    """What each command runs, a line a case."""
    lines = []
    for command, cases in plan.items():
        lines.append(f"{command}: {len(cases)} cases, {sum(case.seconds for case in cases):.0f} s at most")
        lines += [f"  {case.seconds:3.0f} s  {state(case, runs, hashes):10} {case.full}" for case in cases]
    return "\n".join(lines)
