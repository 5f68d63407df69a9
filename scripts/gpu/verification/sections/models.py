"""Models, optimizers, homes and products of other kinds: the CPU's losses, the same bits recomputed, planned = measured."""
import json

from ..case import ATTENTION, STREAMS, kernels
from ..outcome import require

STEPS = 4
# Relative, in loss: both sum in f32, in another order. In FP8 a sum that rounds the other way to bf16 changes codes.
NEAR, NEAR_FP8 = 1e-4, 5e-3
SMALL = ["--config", "tiny", "--micro-batch", 4, "--accum", 2]
GPT2 = ["--config", "gpt2", "--seq", 64, "--micro-batch", 2, "--set", "model.layers=2"]
HOST = ["--offload-parameters", "pinned", "--offload-gradients", "pinned"]
GEMMA2 = [*SMALL, "--seq", 256, *(word for key in ("norm_placement=both", "zero_centered_norm=true", "activation=geglu_tanh", "scale_embedding=true",
                                                   "attn_logit_softcapping=50", "final_logit_softcapping=30") for word in ("--set", f"model.{key}"))]
GPT_OSS = ["--config", "tiny-moe", "--seq", 256, *(word for key in ("o_bias=true", "attention_sinks=true", "activation=clamped_swiglu", "experts.biases=true",
                                                                   "experts.shared_ffn=0", "experts.shared_gate=false") for word in ("--set", f"model.{key}"))]
FP8, EXPERTS = kernels("fp8", "swiglu", "rms_norm"), kernels("experts", "grouped_matmul", "grouped_matmul_sm90", "router")
# Flags, and the sources of what is its own. The first five have run on no GPU.
FLAGS = {
    "FP8, codes of weights on the host": ([*SMALL, "--fp8", "tensor", "--set", "fp8.weights=step", *HOST], FP8),
    "FP8, e4m3, GPT-2, dropout": ([*GPT2, "--fp8", "tensor", "--set", "fp8.gradients=e4m3"], (*kernels("layer_norm", "gelu", "dropout"), *FP8)),
    "caps, norms of 1 + weight, GELU in the gate (Gemma 2)": (GEMMA2, (*ATTENTION, *kernels("rms_norm", "swiglu", "cross_entropy"))),
    "sinks, biases of experts, clamped gates (gpt-oss)": (GPT_OSS, (*ATTENTION, *EXPERTS)),
    "adapters, base in MXFP4": ([*GPT_OSS, "--lora", 8, "--base-dtype", "mxfp4"], (*kernels("dequantise"), *EXPERTS)),
    "FP8": ([*SMALL, "--fp8", "tensor"], FP8),
    "FP8, kept in bf16, weights for a step": ([*SMALL, "--fp8", "tensor", "--set", "fp8.save=false", "--set", "fp8.weights=step"], FP8),
    "experts": (["--config", "tiny-moe"], EXPERTS),
    "latents and experts": (["--config", "tiny-mla"], (*kernels("latent"), *EXPERTS, *ATTENTION)),
    "adapters": ([*SMALL, "--lora", 8], kernels("matmul")),
    "adapters on GPT-2, dropout": ([*GPT2, "--lora", 8, "--set", "lora.dropout=0.1"], kernels("layer_norm", "gelu", "dropout")),
    "adapters, base of 4 bits": ([*SMALL, "--lora", 8, "--base-dtype", "nf4"], kernels("dequantise")),
    "adapters, base of 8 bits, experts": (["--config", "tiny-moe", "--lora", 8, "--base-dtype", "8bit"], (*kernels("dequantise"), *EXPERTS)),
    "Muon": ([*SMALL, "--optimizer", "muon"], kernels("muon")),
    "Adafactor": ([*SMALL, "--optimizer", "adafactor"], kernels("adafactor")),
    "Muon, experts": (["--config", "tiny-moe", "--optimizer", "muon"], (*kernels("muon"), *EXPERTS)),
    "padded documents": ([*SMALL, "--seq", 256, "--packing", "pad"], ATTENTION),
    "documents, first fit": ([*SMALL, "--seq", 256, "--packing", "first-fit"], ATTENTION),
    "documents, first fit, experts": (["--config", "tiny-moe", "--seq", 256, "--packing", "first-fit"], (*ATTENTION, *EXPERTS)),
    "parts of a sequence": ([*SMALL, "--context-parts", 2], ATTENTION),
    "weights and gradients on the host": ([*SMALL, *HOST], STREAMS),
    "everything on the host, experts": (["--config", "tiny-moe", *HOST, "--offload-optimizer", "pinned"], (*STREAMS, *EXPERTS)),
}
CASES = {case: 10 if "gpt2" in flags else 5 for case, (flags, _) in FLAGS.items()}
LOSSES = "cpu-losses.json"


def sources(case):
    return FLAGS[case][1]


def dtypes(case):
    return ("bf16",) if "--fp8" in FLAGS[case][0] else ("f32", "bf16")


def is_compared(case, dtype):
    """Whether a run's losses are those of the CPU: in bf16 only products of FP8 round alike."""
    return dtype == "f32" or "--fp8" in FLAGS[case][0]


def arguments(place, case, dtype):
    flags = FLAGS[case][0]
    documents = ["--data", place.bundle / "golden" / "documents"] if "--packing" in flags else []
    return [*flags, *documents, "--dtype", dtype, "--steps", STEPS]


def cpu_losses(place):
    """The losses of every case on the CPU, which the bundle holds."""
    compared = [(case, dtype) for case in FLAGS for dtype in dtypes(case) if is_compared(case, dtype)]
    return {f"{case}, {dtype}": [step["loss"] for step in place.train(*arguments(place, case, dtype), device="cpu").metrics.steps]
            for case, dtype in compared}


def run(place, found, case):
    rows = found.table("Models of other kinds", "run", "type", "peak, bytes", "recomputed, bytes", "same bits", "furthest loss from the CPU's")
    losses = json.loads(place.prepared(LOSSES).read_text())
    runs = iter(place.train_all([[*arguments(place, case, dtype), "--recompute", mode] for dtype in dtypes(case) for mode in ("none", "full")]))
    for dtype, kept, recomputed in zip(dtypes(case), runs, runs):
        furthest = distance(kept, losses[f"{case}, {dtype}"]) if is_compared(case, dtype) else None
        same = kept.metrics.bits() == recomputed.metrics.bits()
        rows.append([case, dtype, f"{max(kept.metrics.peaks()):,}", f"{max(recomputed.metrics.peaks()):,}", "yes" if same else "NO",
                     "-" if furthest is None else f"{furthest:.1e}"])
        if furthest is not None:
            found.figures["furthest"] = furthest
        judge(f"{case}, {dtype}", kept, recomputed, furthest, NEAR_FP8 if "--fp8" in FLAGS[case][0] else NEAR)


def distance(trained, losses):
    """The largest relative difference of the steps' losses."""
    require(len(trained.metrics.steps) == len(losses), "the bundle has losses of another number of steps")
    return max(abs(step["loss"] / loss - 1) for step, loss in zip(trained.metrics.steps, losses))


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
