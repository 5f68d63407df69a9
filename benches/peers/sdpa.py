#!/usr/bin/env python3
"""Peer: PyTorch's scaled_dot_product_attention(is_causal=True) on the CPU, forward and backward.

Prints one JSON line for each sequence length: the fastest milliseconds of each pass. The shapes are those of
`cargo bench -p kernels --bench attention`: tensors [batch, heads, seq, head_dim], as a model's transposed projections.
  python sdpa.py --batch 1 --heads 8 --kv-heads 8 --head-dim 64 --seq 256 512 1024 2048 --threads 2
"""
import argparse, json, time
import torch, torch.nn.functional as F

p = argparse.ArgumentParser()
for n, d in dict(batch=1, heads=8, kv_heads=8, head_dim=64, threads=2).items():
    p.add_argument("--" + n.replace("_", "-"), type=int, default=d)
p.add_argument("--seq", type=int, nargs="+", default=[256, 512, 1024, 2048])
a = p.parse_args()
torch.set_num_threads(a.threads)
torch.manual_seed(0)


def heads(count, seq):
    """[b, heads, s, d] as a view of [b, s, heads * d], like a projection's output."""
    x = torch.rand(a.batch, seq, count * a.head_dim) * 2 - 1
    return x.view(a.batch, seq, count, a.head_dim).transpose(1, 2).detach().requires_grad_()


for seq in a.seq:
    q, k, v = heads(a.heads, seq), heads(a.kv_heads, seq), heads(a.kv_heads, seq)
    dout = heads(a.heads, seq).detach()
    forward = backward = float("inf")
    for _ in range(max(16 * 1024 // seq // a.batch, 5) + 2):
        start = time.perf_counter()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=a.heads != a.kv_heads)
        middle = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), dout)
        end = time.perf_counter()
        forward, backward = min(forward, middle - start), min(backward, end - middle)
    print(json.dumps(dict(peer="sdpa", torch=torch.__version__, threads=a.threads, batch=a.batch, heads=a.heads,
                          kv_heads=a.kv_heads, head_dim=a.head_dim, seq=seq, forward_ms=round(forward * 1e3, 3),
                          backward_ms=round(backward * 1e3, 3), both_ms=round((forward + backward) * 1e3, 3))), flush=True)
