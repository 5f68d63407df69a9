"""Every recompute mode gives the same bits, which says something only if the modes do different things."""
from ..case import STEP
from ..outcome import require

MODES = ["none", "layernorm", "qkv", "core_attn", "attn_out", "mlp", "mlp_act", "core_attn,layernorm,mlp", "full", "full:uniform:2",
         "full:block:2"]
STEPS = 4

# A type, and a kind of attention.
CASES = dict.fromkeys(("f32 eager", "f32 flash", "bf16 eager", "bf16 flash"), 12)


def sources(_case):
    return STEP


def run(place, found, case):
    dtype, attention = case.split()
    model = ["--config", "llama-15m", "--seq", 512, "--micro-batch", 2, "--accum", 2] if place.is_gpu else \
        ["--config", "tiny", "--seq", 192, "--micro-batch", 2, "--accum", 2]
    # The modes, and the first one again.
    runs = place.train_all([[*model, "--steps", STEPS, "--dtype", dtype, "--attention", attention, "--recompute", mode] for mode in [*MODES, MODES[0]]])
    family = [trained.metrics for trained in runs]
    rows = found.table("Peaks", "type", "attention", "recompute", "peak, bytes", "stages replayed a step", "same bits")
    for mode, metrics in zip(MODES, family):
        same = "yes" if metrics.bits() == family[0].bits() else "NO"
        rows.append([dtype, attention, mode, f"{max(metrics.peaks()):,}", str(sum(count for _, count in metrics.replayed())), same])
    found.figures["runs"] = len(runs)
    for metrics in family:
        said = (metrics.header["dtype"], metrics.header["attention"])
        require(said == (dtype, attention), f"{case}: the run's record says {said}")
    judge(case, family)


def judge(name, family):
    """The modes differ in what they do, and in nothing else. The last run repeats the first."""
    none, *others, again = family
    require(len(set(none.bits())) == STEPS, f"{name}: the steps do not differ from one another")
    require(not none.replayed(), f"{name}: `none` replays")
    distinct = {metrics.replayed() for metrics in family[:-1]}
    require(len(distinct) == len(MODES), f"{name}: two modes replay the same stages")
    for mode, metrics in zip(MODES[1:], others):
        require(max(metrics.peaks()) < max(none.peaks()), f"{name}: the peak of {mode} is not below that of none")
    for mode, metrics in zip(MODES[1:], others):
        require(metrics.bits() == none.bits(), f"{name}: {mode} gives {first_difference(metrics, none)} of none")
    require(again.bits() == none.bits(), f"{name}: a second run gives {first_difference(again, none)} of the first")


def first_difference(actual, expected):
    for step, (one, other) in enumerate(zip(actual.bits(), expected.bits()), 1):
        if one != other:
            return f"loss and gradient norm {one} in step {step}, not the {other}"
    return "another number of steps than that"
