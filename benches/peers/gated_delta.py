#!/usr/bin/env python3
"""Peer: the gated delta rule in chunks of transformers (Qwen3-Next) in PyTorch on the CPU, forward, and forward and backward.

Prints one JSON line: the fastest milliseconds of each. The shapes are those of `cargo bench -p kernels --bench gated_delta`.
  python gated_delta.py --seq 4096 --key-heads 16 --value-heads 32 --head-dim 128 --threads 2
"""
import argparse, json, time
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

p = argparse.ArgumentParser()
for n, d in dict(seq=4096, key_heads=16, value_heads=32, head_dim=128, threads=2, rounds=3).items():
    p.add_argument("--" + n.replace("_", "-"), type=int, default=d)
a = p.parse_args()
torch.set_num_threads(a.threads)
torch.manual_seed(0)
q, k, v, dout = (torch.rand(1, a.seq, heads, a.head_dim) * 2 - 1 for heads in (a.key_heads, a.key_heads, a.value_heads, a.value_heads))
beta, g = torch.rand(1, a.seq, a.value_heads), -torch.rand(1, a.seq, a.value_heads)
inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]


def rule(q, k, v, g, beta):
    q, k = (x.repeat_interleave(a.value_heads // a.key_heads, dim=2) for x in (q, k))
    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True)[0]


forward = both = float("inf")
for _ in range(a.rounds):
    start = time.perf_counter()
    with torch.no_grad():
        rule(*inputs)
    middle = time.perf_counter()
    torch.autograd.grad(rule(*inputs), inputs, dout)
    forward, both = min(forward, middle - start), min(both, time.perf_counter() - middle)
print(json.dumps(dict(peer="transformers", torch=torch.__version__, threads=a.threads, seq=a.seq, key_heads=a.key_heads, value_heads=a.value_heads,
                      head_dim=a.head_dim, forward_ms=round(forward * 1e3, 1), both_ms=round(both * 1e3, 1))))
