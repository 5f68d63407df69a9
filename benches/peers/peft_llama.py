#!/usr/bin/env python3
"""Peer: training steps of adapters by Hugging Face's PEFT on transformers' Llama, on the CPU.

Prints one JSON line: tokens/s (median over steps after warm-up), losses, peak resident set.
  python peft_llama.py --lora 8 --base-dtype f32|nf4
Adapters are on all linear layers of the blocks. SDPA attention, fused AdamW on the factors, clipping. In NF4 are the linear layers
of the blocks, by bitsandbytes' kernels for the CPU.
"""
import argparse
import json
import resource
import statistics
import time

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peft_reference import in_nf4
from transformers_step import Optimizer


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = dict(lora=8, hidden=288, layers=6, heads=6, kv_heads=6, head_dim=48, ffn=768, vocab=32000, seq=256, micro_batch=4, steps=10,
                   warmup=3)
    for name, default in numbers.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--base-dtype", default="f32", choices=["f32", "nf4"])
    return parser.parse_args()


def model(a):
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=a.vocab, hidden_size=a.hidden, intermediate_size=a.ffn, num_hidden_layers=a.layers, num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads, head_dim=a.head_dim, use_cache=False, tie_word_embeddings=False, attn_implementation="sdpa"))
    if a.base_dtype == "nf4":
        llama = in_nf4(llama)
    return peft.get_peft_model(llama, peft.LoraConfig(
        task_type="CAUSAL_LM", r=a.lora, lora_alpha=a.lora, lora_dropout=0.0, target_modules="all-linear")).train()


def main():
    a = arguments()
    adapted = model(a)
    optimizer = Optimizer([(name, weight) for name, weight in adapted.named_parameters() if weight.requires_grad], master=False)
    times, losses = [], []
    for _ in range(a.steps):
        start = time.perf_counter()
        ids = torch.randint(0, a.vocab, (a.micro_batch, a.seq + 1))
        logits = adapted(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.view(-1, a.vocab), ids[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    typical = statistics.median(times[a.warmup:] or times)
    print(json.dumps(dict(peer="peft " + peft.__version__, base_dtype=a.base_dtype, trained=sum(weight.numel() for weight in optimizer.weights),
                          step_s=round(typical, 4), tokens_per_s=round(a.micro_batch * a.seq / typical, 1), loss=[losses[0], losses[-1]],
                          peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)))


if __name__ == "__main__":
    main()
