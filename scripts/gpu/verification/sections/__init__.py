"""The sections, and their cases in the order in which they are worth their time."""
from ..case import Case
from . import (beside, choices, conformance, doctor, graphs, homes, kernels, limit, models, modes, offload, operations, plan, preflight, protocol,
               references, rehearsal, robust, sanitizer, speed, states, traces, tuning)

# Each module has CASES, seconds that each case may take at most, by name; run(place, found, case), or `run_together`, which runs several cases
# at once; and, if it is not always run, sources(case), the files that a result depends on. IS_SPEED: it takes times. What a section shows is
# said in ../status.toml.
SECTIONS = {"preflight": preflight, "doctor": doctor, "conformance": conformance, "models": models, "beside": beside, "robust": robust,
            "kernels": kernels, "graphs": graphs, "homes": homes, "protocol": protocol, "choices": choices, "traces": traces, "plan": plan,
            "sanitizer": sanitizer, "modes": modes, "references": references, "rehearsal": rehearsal, "limit": limit, "offload": offload,
            "states": states, "speed": speed, "operations": operations, "tuning": tuning}
# The first finds at once what would make the rest worthless; the others need the second's figures of the GPU.
ALWAYS = ("preflight", "doctor")
# What has passed before, of these, comes after times: conformance sees a change of a kernel sooner.
LATE = ("plan", "sanitizer", "modes", "references", "rehearsal", "limit", "offload", "states")
# Times that come before others, taken before or not.
HEADLINES = ("kernels", "protocol/LLMQ, Qwen2.5-1.5B, bf16", "protocol/LLMQ, Qwen2.5-1.5B, FP8", "speed/Qwen2.5-1.5B, 8 x 1,024",
             "homes/states of 7B, 8 layers", "graphs", "speed/Llama-3.2 1B, 2 x 4,096", "protocol")


def cases(section=None):
    """The cases of a section, or of all that are not always run."""
    every = [Case(section, name, seconds, tuple(module.sources(name)), getattr(module, "IS_SPEED", False), section in LATE)
             for section, module in SECTIONS.items() if section not in ALWAYS for name, seconds in module.CASES.items()]
    return [case for case in every if section in (None, case.section)]


def rank(case):
    """The place of a time among the headlines; behind them if it is none."""
    named = [HEADLINES.index(name) for name in (case.full, case.section) if name in HEADLINES]
    return named[0] if named else len(HEADLINES)
