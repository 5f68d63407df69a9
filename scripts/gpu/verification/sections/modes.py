"""Every recompute mode gives the same bits, which says something only if the modes do different things."""
from ..outcome import require

CHECKS = "loss and gradient norm have the same bits in every recompute mode, whose peaks and replays differ; and in a second run"
SECONDS = 90

MODES = ["none", "layernorm", "qkv", "core_attn", "attn_out", "mlp", "mlp_act", "core_attn,layernorm,mlp", "full", "full:uniform:2",
         "full:block:2"]
STEPS = 4


def run(place, found):
    model = ["--config", "llama-15m", "--seq", 512, "--micro-batch", 2, "--accum", 2] if place.is_cuda else \
        ["--config", "tiny", "--seq", 192, "--micro-batch", 2, "--accum", 2]
    # For each type and kind of attention the modes, and the first one again.
    families = [(dtype, attention) for dtype in ("f32", "bf16") for attention in ("eager", "flash")]
    cases = [(*family, mode) for family in families for mode in [*MODES, MODES[0]]]
    commands = [[*model, "--steps", STEPS, "--dtype", dtype, "--attention", attention, "--recompute", mode]
                for dtype, attention, mode in cases]
    runs = [trained.metrics for trained in place.train_all(commands)]
    rows = found.table("Peaks", "type", "attention", "recompute", "peak, bytes", "stages replayed a step", "same bits")
    count = len(MODES) + 1
    for index, (dtype, attention) in enumerate(families):
        family = runs[index * count:(index + 1) * count]
        for mode, metrics in zip(MODES, family):
            same = "yes" if metrics.bits() == family[0].bits() else "NO"
            rows.append([dtype, attention, mode, f"{max(metrics.peaks()):,}", str(sum(count for _, count in metrics.replayed())), same])
        found.figures[f"{dtype}/{attention}"] = dict(
            bits=family[0].bits(), peaks={mode: max(metrics.peaks()) for mode, metrics in zip(MODES, family)})
        judge(f"{dtype}, {attention}", family)
    firsts = {family: runs[index * count] for index, family in enumerate(families)}
    judge_families(firsts)


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


def judge_families(firsts):
    """Types and kinds of attention are different arithmetic: equal bits would mean that one of them was not used."""
    bits = {str(metrics.bits()) for metrics in firsts.values()}
    require(len(bits) == len(firsts), "two types or kinds of attention give the same bits: one was not used")
    for dtype in ("f32", "bf16"):
        eager, flash = (max(firsts[dtype, attention].peaks()) for attention in ("eager", "flash"))
        require(flash < eager, f"{dtype}: the peak of flash attention is not below that of eager attention")
