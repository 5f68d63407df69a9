#!/usr/bin/env python3
"""Peer: a training step of transformers' Qwen3-MoE or GLM-4.5, on the CPU or a GPU, by its grouped products or its loop over experts.

Prints one JSON line: tokens/s (median over steps after warm-up), losses, peak memory.
  python transformers_moe.py --experts 64 --chosen 4 --expert-ffn 192 --implementation grouped_mm|eager
SDPA attention, fused AdamW, clipping. In bf16 weights, gradients and moments are bf16; with --master AdamW has f32 copies of weights
and gradients, and f32 moments.
"""
import argparse
import json
import resource
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3MoeConfig


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = dict(hidden=288, layers=6, heads=6, kv_heads=6, head_dim=48, ffn=768, vocab=32000, experts=64, chosen=4, expert_ffn=192,
                   seq=256, micro_batch=4, accum=4, steps=10, warmup=3)
    for name, default in numbers.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--family", default="qwen3_moe", choices=["qwen3_moe", "glm4_moe"])
    parser.add_argument("--implementation", default="grouped_mm", choices=["grouped_mm", "eager"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--master", action="store_true")
    return parser.parse_args()


def config(a):
    common = dict(
        vocab_size=a.vocab, hidden_size=a.hidden, intermediate_size=a.ffn, num_hidden_layers=a.layers, num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads, head_dim=a.head_dim, num_experts_per_tok=a.chosen, moe_intermediate_size=a.expert_ffn,
        norm_topk_prob=True, use_cache=False, tie_word_embeddings=False, attn_implementation="sdpa",
        experts_implementation=a.implementation)
    if a.family == "qwen3_moe":
        return Qwen3MoeConfig(**common, num_experts=a.experts, decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=False)
    # As GLM-4.5 Air: half of each head is turned, biases of q, k and v, a shared expert, a dense first layer.
    return Glm4MoeConfig(**common, n_routed_experts=a.experts, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
                         partial_rotary_factor=0.5, attention_bias=True, use_qk_norm=False, num_nextn_predict_layers=0)


def model(a):
    torch.manual_seed(0)
    # Drawn where they are used, which takes a GPU no time.
    torch.set_default_device(a.device)
    made = AutoModelForCausalLM.from_config(config(a)).train().to(a.device, {"f32": torch.float32, "bf16": torch.bfloat16}[a.dtype])
    assert made.config._experts_implementation == a.implementation
    return made


class Optimizer:
    """Clipping and AdamW, on the weights or on f32 copies of them. Matrices decay, norm weights do not."""

    def __init__(self, weights, master):
        self.weights = weights
        self.copies = [weight.detach().float() for weight in weights] if master else weights
        matrices = [copy for copy in self.copies if copy.dim() > 1]
        vectors = [copy for copy in self.copies if copy.dim() == 1]
        groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
        self.adamw = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)

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
    optimizer = Optimizer(list(trained.parameters()), a.master)
    times, losses = [], []
    for _ in range(a.steps):
        start, total = time.perf_counter(), 0.0
        for _ in range(a.accum):
            ids = torch.randint(0, a.vocab, (a.micro_batch, a.seq + 1), device=a.device)
            logits = trained(ids[:, :-1]).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.view(-1, a.vocab), ids[:, 1:].reshape(-1)) / a.accum
            loss.backward()
            total += loss.item()
        optimizer.step()
        if a.device != "cpu":
            torch.cuda.synchronize()
        losses.append(total)
        times.append(time.perf_counter() - start)
    typical = statistics.median(times[a.warmup:] or times)
    print(json.dumps(dict(peer="torch " + torch.__version__, implementation=a.implementation, dtype=a.dtype,
                          params=sum(weight.numel() for weight in trained.parameters()), step_s=round(typical, 4),
                          tokens_per_s=round(a.micro_batch * a.accum * a.seq / typical, 1), loss=[losses[0], losses[-1]],
                          peak_allocated_bytes=torch.cuda.max_memory_allocated() if a.device != "cpu" else None,
                          peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)))


if __name__ == "__main__":
    main()
