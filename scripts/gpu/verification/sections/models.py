"""Models, optimizers, homes and products of other kinds: the CPU's losses, the same bits recomputed, planned = measured."""
from ..outcome import require

CHECKS = ("experts, latents, adapters, bases of 4 and 8 bits, Muon, Adafactor, documents, parts of a sequence, products in FP8, and weights and "
          "gradients on the host: the CPU's losses in f32 (FP8's in bf16), the same bits when everything is recomputed, planned peak = measured peak")
SECONDS = 90

STEPS = 4
# Relative, in loss: both sum in f32, in another order. In FP8 a sum that rounds the other way to bf16 changes codes.
NEAR, NEAR_FP8 = 1e-4, 5e-3
SMALL = ["--config", "tiny", "--micro-batch", 4, "--accum", 2]
HOST = ["--offload-parameters", "pinned", "--offload-gradients", "pinned"]
CASES = {
    "experts": ["--config", "tiny-moe"],
    "latents and experts": ["--config", "tiny-mla"],
    "adapters": [*SMALL, "--lora", 8],
    "adapters on GPT-2, dropout": ["--config", "gpt2", "--seq", 64, "--micro-batch", 2, "--lora", 8, "--set", "lora.dropout=0.1",
                                   "--set", "model.layers=2"],
    "adapters, base of 4 bits": [*SMALL, "--lora", 8, "--base-dtype", "nf4"],
    "adapters, base of 8 bits, experts": ["--config", "tiny-moe", "--lora", 8, "--base-dtype", "8bit"],
    "Muon": [*SMALL, "--optimizer", "muon"],
    "Adafactor": [*SMALL, "--optimizer", "adafactor"],
    "Muon, experts": ["--config", "tiny-moe", "--optimizer", "muon"],
    "padded documents": [*SMALL, "--seq", 256, "--packing", "pad"],
    "documents, first fit": [*SMALL, "--seq", 256, "--packing", "first-fit"],
    "documents, first fit, experts": ["--config", "tiny-moe", "--seq", 256, "--packing", "first-fit"],
    "parts of a sequence": [*SMALL, "--context-parts", 2],
    "weights and gradients on the host": [*SMALL, *HOST],
    "everything on the host, experts": ["--config", "tiny-moe", *HOST, "--offload-optimizer", "pinned"],
    "FP8": [*SMALL, "--fp8", "tensor"],
    "FP8, kept in bf16, weights for a step": [*SMALL, "--fp8", "tensor", "--set", "fp8.save=false", "--set", "fp8.weights=step"],
    "FP8, codes of weights on the host": [*SMALL, "--fp8", "tensor", "--set", "fp8.weights=step", *HOST],
    "FP8, e4m3, GPT-2, dropout": ["--config", "gpt2", "--seq", 64, "--micro-batch", 2, "--fp8", "tensor", "--set", "fp8.gradients=e4m3",
                                  "--set", "model.layers=2"],
}


def run(place, found):
    rows = found.table("Models of other kinds", "run", "type", "peak, bytes", "recomputed, bytes", "same bits", "furthest loss from the CPU's")
    for name, flags in CASES.items():
        is_fp8 = "--fp8" in flags
        for dtype in ("bf16",) if is_fp8 else ("f32", "bf16"):
            documents = ["--data", place.bundle / "golden" / "documents"] if "--packing" in flags else []
            common = [*flags, *documents, "--dtype", dtype, "--steps", STEPS]
            kept, recomputed = place.train_all([[*common, "--recompute", mode] for mode in ("none", "full")])
            reference = place.train(*common, device="cpu") if (is_fp8 or dtype == "f32") and place.is_cuda else None
            furthest = distance(kept, reference) if reference else None
            same = kept.metrics.bits() == recomputed.metrics.bits()
            rows.append([name, dtype, f"{max(kept.metrics.peaks()):,}", f"{max(recomputed.metrics.peaks()):,}", "yes" if same else "NO",
                         "-" if furthest is None else f"{furthest:.1e}"])
            found.figures[f"{name}, {dtype}"] = dict(furthest=furthest, bits=kept.metrics.bits())
            judge(f"{name}, {dtype}", kept, recomputed, furthest, NEAR_FP8 if is_fp8 else NEAR)


def distance(trained, reference):
    """The largest relative difference of the steps' losses."""
    pairs = list(zip(trained.metrics.steps, reference.metrics.steps))
    return max(abs(one["loss"] / other["loss"] - 1) for one, other in pairs)


def judge(name, kept, recomputed, furthest, near):
    require(len(set(kept.metrics.bits())) == STEPS, f"{name}: the steps do not differ from one another")
    require(recomputed.metrics.replayed() and not kept.metrics.replayed(), f"{name}: `full` replays nothing, or `none` something")
    require(recomputed.metrics.bits() == kept.metrics.bits(), f"{name}: a second run, with everything recomputed, has other bits")
    for trained in (kept, recomputed):
        for step in trained.metrics.steps:
            require(step["peak_bytes"] == step["planned_peak_bytes"],
                    f"{name}: planned {step['planned_peak_bytes']:,} bytes, measured {step['peak_bytes']:,}")
    if furthest is not None:
        require(furthest < near, f"{name}: losses are {furthest:.1e} from the CPU's")
