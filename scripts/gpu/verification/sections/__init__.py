"""The sections, the most informative per minute first."""
from . import (conformance, cudnn, doctor, graphs, limit, models, modes, more_speed, offload, operations, plan, preflight, references, rehearsal,
               sanitizer, speed, states, tuning)

# In the order in which they run: what the trainer promises, in whole runs; then each kernel; then speed; then one feature after the
# other. Each module has CHECKS, a sentence; SECONDS, the most that it may take where all are run; and run().
SECTIONS = {"preflight": preflight, "doctor": doctor, "references": references, "plan": plan, "modes": modes, "conformance": conformance,
            "models": models, "speed": speed, "rehearsal": rehearsal, "limit": limit, "cudnn": cudnn, "graphs": graphs, "tuning": tuning,
            "offload": offload, "operations": operations, "states": states, "more-speed": more_speed, "sanitizer": sanitizer}
