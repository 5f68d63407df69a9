"""The protocols of others: their shapes, their states, their tokens a step, beside the figures that they publish."""
from dataclasses import dataclass

from ..case import PASSES, STEP, crate, kernels
from ..outcome import Skipped, require

IS_SPEED = True

# 524,288 tokens a step, bf16 states and no master (which rounds stochastically).
BF16_STATES = ("--dtype", "bf16", "--state-dtype", "bf16", "--master", "none", "--grad-dtype", "bf16")
FP8 = ("--fp8", "tensor", "--set", "fp8.weights=step")
LLMQ = ("--config", "qwen2.5-1.5b", "--seq", 1024, "--micro-batch", 32, "--accum", 16, *BF16_STATES)
LLMQ_7B = ("--config", "qwen2.5-7b", "--seq", 1024, "--micro-batch", 16, "--accum", 16, *BF16_STATES)
LORA = ("--config", "llama-3-8b", "--lora", 16, "--seq", 4096, "--micro-batch", 2, "--accum", 16, *BF16_STATES[:-2])
BRIDGE = ("--config", "llama-3-8b", "--seq", 8192, "--micro-batch", 1, *BF16_STATES, *FP8)

OF_LLMQ = "its README at 00ea1be9: one H100, micro-batches of {}"
OF_NEMO = "NeMo Automodel's docs/performance-summary.md of 2025-10-02: H100, 2 x 4,096 x 16, LoRA in bf16"
OF_BRIDGE = "benches/results/2026-11-27-published-layouts.md: each of 8 H100s under FSDP, 128 sequences a step"


@dataclass
class Protocol:
    """Our flags, how many seconds they take, what others publish and where. With `layers`, runs of so many layers say what all of them take."""
    flags: tuple
    seconds: int
    theirs: float
    source: str
    steps: int = 3
    layers: tuple = ()
    all_layers: int = 0

PROTOCOLS = {
    "LLMQ, Qwen2.5-1.5B, bf16": Protocol(LLMQ, 45, 58_000, OF_LLMQ.format(16)),
    "LLMQ, Qwen2.5-1.5B, FP8": Protocol((*LLMQ, *FP8), 45, 68_000, OF_LLMQ.format(16)),
    "NeMo Automodel, LoRA of Llama-3 8B": Protocol(LORA, 60, 12_472.87, OF_NEMO),
    "Megatron-Bridge, Llama-3 8B, FP8, from 4 and 8 layers": Protocol((*BRIDGE, "--accum", 16), 60, 14_451, OF_BRIDGE, layers=(4, 8), all_layers=32),
    "LLMQ, Qwen2.5-7B, bf16, from 4 and 8 layers": Protocol(LLMQ_7B, 50, 14_000, OF_LLMQ.format(4), layers=(4, 8), all_layers=28),
    "LLMQ, Qwen2.5-7B, FP8, from 4 and 8 layers": Protocol((*LLMQ_7B, *FP8), 45, 18_000, OF_LLMQ.format(4), layers=(4, 8), all_layers=28),
    "Megatron-Bridge, Llama-3 8B, FP8, whole": Protocol((*BRIDGE, "--accum", 8), 60, 14_451, OF_BRIDGE, steps=2),
}
CASES = {name: protocol.seconds for name, protocol in PROTOCOLS.items()}


def sources(case):
    fp8 = (*kernels("fp8"), *crate("model", "pass_fp8")) if "FP8" in case else ()
    return (*STEP, *PASSES, *fp8, *(crate("model", "adapter") if "LoRA" in case else ()))


def run(place, found, case):
    protocol = PROTOCOLS[case]
    rows = found.table("Others' protocols", "protocol", "ours, tokens/s", "step, ms", "peak, bytes", "SM clock, MHz", "watts", "theirs, tokens/s", "ours / theirs", "where theirs is from")
    variants = [("--set", f"model.layers={layers}") for layers in protocol.layers] or [()]
    runs = [measured(place, protocol, more) for more in variants]
    trained, watch = runs[-1]
    times = [one.metrics.median("step_ms", 1) for one, _ in runs]
    step_ms = whole(protocol, times)
    tokens = trained.metrics.median("tokens_per_s", 1) * times[-1] / step_ms
    found.figures.update(tokens_per_s=tokens, step_ms=step_ms, theirs=protocol.theirs, peak_bytes=trained.plan["peak_bytes"], **watch.figures())
    rows.append([case, f"{tokens:,.0f}", f"{step_ms:,.0f}", f"{trained.plan['peak_bytes']:,}", watch.sm_mhz, watch.watts, f"{protocol.theirs:,.0f}",
                 f"{tokens / protocol.theirs:.2f}", protocol.source])


def measured(place, protocol, more):
    flags = [*place.sized(*protocol.flags, *more), "--steps", protocol.steps]
    if place.is_gpu:
        flags += ["--data", place.prepared("tokens.bin"), "--no-shuffle"]
        planned, total = place.plan(*flags), place.gpu()["memory"]["total"]
        if planned["reserved_bytes"] + planned["device_overhead_bytes"] > total:
            raise Skipped(f"{planned['reserved_bytes']:,} bytes do not fit {total:,}")
    trained, watch = place.train_watched(*flags)
    require(trained.metrics.peaks() == {trained.plan["peak_bytes"]}, f"{trained.plan['peak_bytes']:,} bytes were planned, the peaks are {trained.metrics.peaks()}")
    return trained, watch


def whole(protocol, times):
    """A step's time with all layers: each takes what those take by which two runs differ."""
    if not protocol.layers:
        return times[-1]
    few, many = protocol.layers
    return times[1] + (protocol.all_layers - many) * (times[1] - times[0]) / (many - few)
