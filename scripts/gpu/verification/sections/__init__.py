"""The sections, most important first."""
from . import (conformance, cudnn, doctor, graphs, limit, modes, offload, operations, plan, preflight, references, rehearsal, sanitizer, speed,
               states, tuning)

# In the order in which they run. Each module has CHECKS, a sentence; SECONDS, the most that it
# may take where all are run; and run().
SECTIONS = {"preflight": preflight, "doctor": doctor, "rehearsal": rehearsal, "references": references, "conformance": conformance,
            "modes": modes, "plan": plan, "limit": limit, "states": states, "offload": offload, "graphs": graphs, "cudnn": cudnn,
            "tuning": tuning, "operations": operations, "sanitizer": sanitizer, "speed": speed}
