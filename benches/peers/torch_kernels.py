#!/usr/bin/env python3
"""Peer: kernels that people would use, one by one: SDPA by flash and by cuDNN, flash-attention 3, _grouped_mm, _scaled_mm, fused AdamW,
cross-entropy, RMSNorm.

Prints one JSON object a line, as `kernel_times --json` does: kernel, model, shape, us (median), min_us, tflops, gbps, peer.
On a GPU: CUDA events, 20 times each, the L2 cache emptied in between, random data. What a version of torch lacks is left out, with a line
on standard error.
  python torch_kernels.py [--case attention --case grouped ...]
  python torch_kernels.py --device cpu --tiny      tries the script where there is no GPU
"""
import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Those of `kernel_times`. The width of the feed-forward layer is that of one expert, where there are some.
MODELS = {
    "qwen2.5-1.5b": dict(batch=32, seq=1024, hidden=1536, heads=12, kv_heads=2, head_dim=128, ffn=8960, vocab=151936),
    "llama-3.2-1b": dict(batch=1, seq=4096, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256),
    "llama-3-8b": dict(batch=1, seq=8192, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256),
    "qwen3-30b-a3b": dict(batch=2, seq=4096, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=768, vocab=151936, experts=128, chosen=8),
    "olmoe-1b-7b": dict(batch=2, seq=4096, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=1024, vocab=50304, experts=64, chosen=8),
    "mixtral-8x7b": dict(batch=1, seq=4096, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32000, experts=8, chosen=2),
}
TINY = dict(batch=1, seq=64, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=32, vocab=256, experts=4, chosen=2)
REPEATS, WARMUP = 20, 3
# More than any L2 cache.
FLUSH_BYTES = 1 << 28
# About a millisecond.
SLEEP_CYCLES = 2_000_000


class Timer:
    """Times calls on a device."""

    def __init__(self, device, repeats):
        self.device, self.repeats, self.is_cuda = device, repeats, device == "cuda"
        if self.is_cuda:
            self.written, self.read = (torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device=device) for _ in range(2))

    def __call__(self, call):
        for _ in range(WARMUP):
            call()
        times = [self.once(call) for _ in range(self.repeats)]
        return dict(us=statistics.median(times), min_us=min(times))

    def once(self, call):
        if not self.is_cuda:
            start = time.perf_counter()
            call()
            return 1e6 * (time.perf_counter() - start)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # As `kernel_times` does: after the write, a read leaves no lines that have to be written back.
        self.written.zero_()
        self.read.sum()
        # The GPU waits until the host has launched everything, so that no time has the host's in it.
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * begin.elapsed_time(end)


def attention(m, device):
    """Peer, kernel, shape, call, FLOPs, bytes: under the causal mask half of the products count, backward 2.5 times those of forward."""
    heads = lambda count: torch.randn(m["batch"], count, m["seq"], m["head_dim"], device=device, dtype=torch.bfloat16, requires_grad=True)
    q, k, v, dout = heads(m["heads"]), heads(m["kv_heads"]), heads(m["kv_heads"]), heads(m["heads"]).detach()
    shape = (m["batch"] * m["seq"], m["heads"] * m["head_dim"])
    flops = 2 * m["batch"] * m["heads"] * m["seq"] ** 2 * m["head_dim"]
    # Not every backend takes fewer heads of keys than of queries.
    wide = [x.repeat_interleave(m["heads"] // m["kv_heads"], 1).detach().requires_grad_() for x in (k, v)]
    backends = dict(flash=SDPBackend.FLASH_ATTENTION, cudnn=SDPBackend.CUDNN_ATTENTION) if device == "cuda" else dict(math=SDPBackend.MATH)
    for name, backend in backends.items():
        for keys, values, grouped, note in ((k, v, True, ""), (*wide, False, ", keys repeated")):
            def forward(backend=backend, keys=keys, values=values, grouped=grouped):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=grouped)
            yield from both(f"SDPA {name}{note}", shape, forward, (q, keys, values), dout, flops)
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        return
    rows = [x.transpose(1, 2).contiguous().detach().requires_grad_() for x in (q, k, v)]
    def forward3():
        out = flash_attn_func(*rows, causal=True)
        return out[0] if isinstance(out, tuple) else out
    yield from both("flash-attention 3", shape, forward3, rows, dout.transpose(1, 2).contiguous(), flops)


def both(peer, shape, forward, inputs, dout, flops):
    yield peer, "flash_attention", shape, no_grad(forward), flops, None
    yield peer, "flash_attention_backward", shape, backward(forward, inputs, dout), 2.5 * flops, None


def no_grad(call):
    def inner():
        with torch.no_grad():
            return call()
    return inner


def backward(forward, inputs, dout):
    """The backward pass alone: the first call, which nobody times, makes what it goes back through."""
    made = []
    def inner():
        made or made.append(forward())
        return torch.autograd.grad(made[0], inputs, dout, retain_graph=True)
    return inner


def grouped(m, device):
    """Products of experts' gate and up: forward, back to their inputs, and the gradient of weights."""
    if "experts" not in m:
        return
    rows, experts, up, hidden = m["batch"] * m["seq"] * m["chosen"], m["experts"], 2 * m["ffn"], m["hidden"]
    random = lambda *sizes: torch.randn(*sizes, device=device, dtype=torch.bfloat16)
    # As uneven as choices of a router are: rows of each expert from half to one and a half of the mean.
    shares = torch.linspace(0.5, 1.5, experts)
    ends = (shares.cumsum(0) / shares.sum() * rows).round().to(device=device, dtype=torch.int32)
    x, y, weights = random(rows, hidden), random(rows, up), random(experts, up, hidden)
    for kernel, shape, a, b in (("grouped_matmul", (rows, hidden, up, experts), x, weights.transpose(1, 2)),
                                ("grouped_matmul.data", (rows, up, hidden, experts), y, weights),
                                ("grouped_gradient", (up, rows, hidden, experts), y.t(), x)):
        yield "_grouped_mm", kernel, shape, lambda a=a, b=b: torch._grouped_mm(a, b, offs=ends), 2 * rows * up * hidden, None


def widths(m):
    """Columns of queries, and of keys or values."""
    return m["heads"] * m["head_dim"], m["kv_heads"] * m["head_dim"]


def products(m, device):
    """Products of bf16 and of FP8 with one scale a tensor, of the widest matrix that every token goes through."""
    (queries, keys), hidden = widths(m), m["hidden"]
    rows, columns = m["batch"] * m["seq"], queries + 2 * keys if "experts" in m else 2 * m["ffn"]
    a, b = (torch.randn(count, hidden, device=device, dtype=torch.bfloat16) for count in (rows, columns))
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
    shape, flops = (rows, hidden, columns), 2 * rows * columns * hidden
    yield "mm", "matmul", shape, lambda: torch.mm(a, b.t()), flops, None
    for kernel, fast in (("scaled_mm", False), ("scaled_mm.fast", True)):
        yield "_scaled_mm", kernel, shape, lambda fast=fast: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast), flops, None


def adamw(m, device):
    """A block's f32 weights, gradients and moments: four read, three written."""
    queries, keys = widths(m)
    count = m["hidden"] * (2 * queries + 2 * keys + 3 * m.get("experts", 1) * m["ffn"])
    weights = torch.randn(count, device=device, requires_grad=True)
    weights.grad = torch.randn_like(weights)
    optimizer = torch.optim.AdamW([weights], lr=1e-4, fused=True)
    yield "fused AdamW, f32", "adamw", (count,), optimizer.step, None, 28 * count


def cross_entropy(m, device):
    """Loss and gradient of a chunk of tokens: logits read, gradients written."""
    rows = min(4096, m["batch"] * m["seq"])
    logits = torch.randn(rows, m["vocab"], device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, m["vocab"], (rows,), device=device)
    def call():
        return torch.autograd.grad(F.cross_entropy(logits, targets), logits)
    yield "F.cross_entropy and its gradient", "cross_entropy", (rows, m["vocab"]), call, None, 4 * rows * m["vocab"]


def rms_norm(m, device):
    tokens, hidden = m["batch"] * m["seq"], m["hidden"]
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight, dout = torch.ones(hidden, device=device, dtype=torch.bfloat16, requires_grad=True), torch.randn_like(x)
    def forward():
        return F.rms_norm(x, (hidden,), weight, 1e-5)
    yield "F.rms_norm", "rms_norm", (tokens, hidden), no_grad(forward), None, 4 * tokens * hidden
    yield "F.rms_norm", "rms_norm_backward", (tokens, hidden), backward(forward, (x, weight), dout), None, 6 * tokens * hidden


CASES = dict(attention=attention, grouped=grouped, products=products, adamw=adamw, cross_entropy=cross_entropy, rms_norm=rms_norm)


# What a version of torch lacks, what a shape refuses, and memory that is short (a RuntimeError).
REFUSALS = (RuntimeError, NotImplementedError, AttributeError, ValueError, TypeError)


def say(what, error):
    print(f"{what}: {(str(error).splitlines() or [type(error).__name__])[0]}", file=sys.stderr)


def attempt(timer, call, what):
    """Times of a call; none where it is refused."""
    try:
        return timer(call)
    except REFUSALS as error:
        say(what, error)
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", metavar="NAME", help=f"of {', '.join(CASES)}; others have no peer [default: all]")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="one model of sizes that a CPU computes at once")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    timer = Timer(arguments.device, 2 if arguments.tiny else REPEATS)
    models = {"tiny": TINY} if arguments.tiny else MODELS
    for name in arguments.case or CASES:
        for model, sizes in models.items() if name in CASES else ():
            try:
                for peer, kernel, shape, call, flops, bytes_ in CASES[name](sizes, arguments.device):
                    took = attempt(timer, call, f"{peer}, {kernel}, {model}")
                    if took:
                        rate = lambda work: work and round(work / took["us"] / 1e6, 4)
                        print(json.dumps(dict(peer=peer, torch=torch.__version__, kernel=kernel, model=model, shape=shape, **took, tflops=rate(flops),
                                              gbps=bytes_ and round(bytes_ / took["us"] / 1e3, 2))), flush=True)
            except REFUSALS as error:
                # Its tensors have no room, or this version of torch lacks their types.
                say(f"{name}, {model}", error)
            if arguments.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
