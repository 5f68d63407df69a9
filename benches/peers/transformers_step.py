#!/usr/bin/env python3
"""Peer: training steps of a model's folder by transformers, on the CPU or a GPU; experts by its grouped products or its loop over them.

Prints one JSON line: tokens/s (median over steps after warm-up), losses, gradient norms of the steps before that, peak memory.
  python transformers_step.py --model DIR --tokens FILE [--experts grouped_mm|eager]
DIR is what `trainer init` writes, and FILE a token file with u32 tokens, which is read in order. SDPA attention where the class has it, fused AdamW,
clipping. In bf16 weights, gradients and moments are bf16; with --master AdamW has f32 copies of weights and gradients, and f32 moments.
"""
import argparse
import array
import json
import pathlib
import resource
import statistics
import time

import torch
from transformers import AutoModelForCausalLM


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(seq=256, micro_batch=4, accum=4, steps=10, warmup=3).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--experts", choices=["grouped_mm", "eager"], help="how it multiplies by experts, if the model has some")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--master", action="store_true")
    return parser.parse_args()


def model(a):
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[a.dtype]
    ways = dict(experts_implementation=a.experts) if a.experts else {}
    made = AutoModelForCausalLM.from_pretrained(a.model, dtype=dtype, local_files_only=True, **ways)
    made.config.use_cache = False
    assert not a.experts or made.config._experts_implementation == a.experts
    return made.train().to(a.device)


class Optimizer:
    """Clipping and AdamW, on the weights or on f32 copies of them. Matrices decay, norm weights and biases do not."""

    def __init__(self, named, master):
        named = list(named)
        self.weights = [weight for _, weight in named]
        self.copies = [weight.detach().float() for weight in self.weights] if master else self.weights
        # Biases of experts have a row for each expert.
        decays = [weight.dim() > 1 and not name.endswith("bias") for name, weight in named]
        groups = [dict(params=[copy for copy, decay in zip(self.copies, decays) if decay is which], weight_decay=rate)
                  for which, rate in [(True, 0.1), (False, 0.0)]]
        self.adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=3e-4, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def step(self):
        if self.copies is not self.weights:
            for copy, weight in zip(self.copies, self.weights):
                copy.grad = weight.grad.float()
        torch.nn.utils.clip_grad_norm_(self.copies, 1.0)
        self.adamw.step()
        if self.copies is not self.weights:
            torch._foreach_copy_(self.weights, self.copies)
        for weight in self.weights:
            weight.grad = None


def main():
    a = arguments()
    trained = model(a)
    optimizer = Optimizer(trained.named_parameters(), a.master)
    data = array.array("i", pathlib.Path(a.tokens).read_bytes())
    assert data[:2].tolist() == [20240801, 7], "not a file of u32 tokens"
    tokens, rows = torch.tensor(data[256:], device=a.device, dtype=torch.int64), 0
    times, losses, norms = [], [], []
    for step in range(a.steps):
        start, total = time.perf_counter(), 0.0
        for _ in range(a.accum):
            ids = torch.stack([tokens[row * a.seq:(row + 1) * a.seq + 1] for row in range(rows, rows + a.micro_batch)])
            rows += a.micro_batch
            logits = trained(ids[:, :-1]).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)) / a.accum
            loss.backward()
            total += loss.item()
        if step < a.warmup:
            # In f64: PyTorch's own sum of a large tensor is 1e-4 off.
            norms.append(sum(weight.grad.double().square().sum() for weight in optimizer.weights).sqrt().item())
        optimizer.step()
        if a.device != "cpu":
            torch.cuda.synchronize()
        losses.append(total)
        times.append(time.perf_counter() - start)
    typical = statistics.median(times[a.warmup:] or times)
    print(json.dumps(dict(peer="torch " + torch.__version__, experts=a.experts, dtype=a.dtype, attention=trained.config._attn_implementation,
                          params=sum(weight.numel() for weight in trained.parameters()), step_s=round(typical, 4),
                          tokens_per_s=round(a.micro_batch * a.accum * a.seq / typical, 1), loss=losses, grad_norm=norms,
                          peak_allocated_bytes=torch.cuda.max_memory_allocated() if a.device != "cpu" else None,
                          peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)))


if __name__ == "__main__":
    main()
