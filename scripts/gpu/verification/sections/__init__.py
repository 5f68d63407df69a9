"""The sections, and their cases in the order in which they are worth their time."""
from ..case import Case
from . import (beside, choices, conformance, doctor, graphs, homes, kernels, limit, models, modes, offload, operations, plan, preflight, protocol,
               references, rehearsal, robust, sanitizer, speed, states, traces, tuning)

# Each module has CHECKS, a sentence; CASES, seconds that each case may take at most, by name; sources(case), the files that a result depends
# on; run(place, found, case). One that has `run_together` runs several cases at once. IS_SPEED: it takes times, which do not go out of date by
# themselves.
SECTIONS = {"preflight": preflight, "doctor": doctor, "conformance": conformance, "models": models, "beside": beside, "robust": robust,
            "kernels": kernels, "graphs": graphs, "homes": homes, "protocol": protocol, "choices": choices, "traces": traces, "plan": plan,
            "sanitizer": sanitizer, "modes": modes, "references": references, "rehearsal": rehearsal, "limit": limit, "offload": offload,
            "states": states, "speed": speed, "operations": operations, "tuning": tuning}
# The first finds at once what would make the rest worthless; the others need the second's figures of the GPU.
ALWAYS = ("preflight", "doctor")


def cases(section=None):
    """The cases of a section, or of all that are not always run."""
    every = [Case(section, name, seconds, tuple(module.sources(name)), getattr(module, "IS_SPEED", False))
             for section, module in SECTIONS.items() if section not in ALWAYS for name, seconds in module.CASES.items()]
    return [case for case in every if section in (None, case.section)]
