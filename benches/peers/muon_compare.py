#!/usr/bin/env python3
"""Holds `--optimizer muon` against `torch.optim.Muon`, on transformers' Llama, Qwen3 and GPT-2: loss and gradient norm of five
steps with clipping, AdamW for embeddings, head and vectors.

  eval "$(benches/peers/setup_torch)"
  LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON benches/peers/muon_compare.py [--trainer PATH] [-- TRAINER FLAGS]

In f32 the reference is PyTorch's own function with its cast to bf16 taken out. Mistakes are made on purpose, and have to be
beyond the tolerance: no Nesterov, shapes that are transposed, and for Llama q, k and v as one matrix. Prints a table of the
largest relative errors, and exits 1 if one is beyond its tolerance or a mistake is within it.
"""
import argparse
import inspect
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import save_file
from torch.optim import _muon

from transformers_reference import (ACCUM, CONFIGS, MASKED, MICRO_BATCH, OPTIMIZER, SEED, SEQ, STEPS, load, random_batches,
                                    write_random_model)

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
FAMILIES = ["llama", "qwen3", "gpt2"]
TOLERANCES = dict(f32=1e-5, bf16=1e-4)
LR = 2e-3
BF16 = _muon._zeropower_via_newtonschulz


def without_cast():
    """PyTorch's iteration in f32."""
    source = inspect.getsource(BF16)
    assert source.count(".bfloat16()") == 1, source
    scope = dict(vars(_muon))
    exec(source.replace(".bfloat16()", ".clone()"), scope)
    return scope["_zeropower_via_newtonschulz"]


ITERATIONS = dict(f32=without_cast(), bf16=BF16)


class Fused(torch.optim.Optimizer):
    """Muon for q, k and v of each layer as if they were one matrix: a mistake."""

    def __init__(self, triples, **options):
        super().__init__([parameter for triple in triples for parameter in triple], {})
        self.triples = triples
        self.joined = [torch.nn.Parameter(torch.cat([p.detach() for p in triple])) for triple in triples]
        self.muon = torch.optim.Muon(self.joined, **options)

    def step(self):
        for joined, triple in zip(self.joined, self.triples):
            joined.grad = torch.cat([parameter.grad for parameter in triple])
        self.muon.step()
        for joined, triple in zip(self.joined, self.triples):
            for parameter, part in zip(triple, joined.detach().split([p.shape[0] for p in triple])):
                parameter.data.copy_(part)


def optimizers(model, adjust, mistake):
    """Muon for matrices of the blocks, AdamW for the rest."""
    hidden = {name: p for name, p in model.named_parameters() if p.ndim == 2 and (".layers." in name or ".h." in name)}
    rest = [p for name, p in model.named_parameters() if name not in hidden]
    decay = OPTIMIZER["weight_decay"]
    groups = [dict(params=[p for p in rest if p.ndim >= 2], weight_decay=decay),
              dict(params=[p for p in rest if p.ndim < 2], weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=OPTIMIZER["betas"], eps=OPTIMIZER["eps"])
    options = dict(lr=LR, weight_decay=decay, adjust_lr_fn=adjust, nesterov=mistake != "no nesterov")
    fused = []
    if mistake == "fused":
        layers = sorted({name.split("q_proj")[0] for name in hidden if "q_proj" in name})
        triples = [[hidden.pop(f"{layer}{part}_proj.weight") for part in "qkv"] for layer in layers]
        fused = [Fused(triples, **options)]
    return [torch.optim.Muon(list(hidden.values()), **options), adamw, *fused]


def train(folder, ids, targets, adjust, dtype, mistake=None):
    """Loss and gradient norm of every step."""
    model = load(folder)
    _muon._zeropower_via_newtonschulz = ITERATIONS[dtype]
    adjust_lr = _muon._adjust_lr
    if mistake == "transposed":
        _muon._adjust_lr = lambda lr, name, shape: adjust_lr(lr, name, shape[::-1])
    all_of = optimizers(model, adjust, mistake)
    steps = []
    for step_ids, step_targets in zip(ids, targets):
        count, loss = int((step_targets != MASKED).sum()), 0.0
        for micro_ids, micro_targets in zip(step_ids, step_targets):
            part = model(input_ids=micro_ids, labels=micro_targets, shift_labels=micro_targets,
                         num_items_in_batch=count).loss
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), OPTIMIZER["clip_grad_norm"]).item()
        for optimizer in all_of:
            optimizer.step()
        model.zero_grad()
        steps.append((loss, norm))
    _muon._adjust_lr = adjust_lr
    return steps


def ours(trainer, folder, adjust, dtype, flags):
    with tempfile.TemporaryDirectory() as out:
        command = [trainer, "train", "--init-from", folder, "--data", folder / "batches.safetensors", "--no-shuffle",
                   "--micro-batch", MICRO_BATCH, "--accum", ACCUM, "--steps", STEPS, "--lr", LR, "--optimizer", "muon",
                   "--set", f"optim.ns_dtype={dtype}", "--set", f"optim.lr_adjust={adjust}", "--out", f"{out}/run",
                   "--device", "cpu", "--dtype", "f32", "--save-every", 0, "--quiet", *flags]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        records = map(json.loads, pathlib.Path(out, "run/metrics.jsonl").read_text().splitlines())
        return [(record["loss"], record["grad_norm"]) for record in records if record["kind"] == "step"]


def distance(found, expected):
    """The largest relative error of any figure."""
    pairs = [pair for ours, theirs in zip(found, expected, strict=True) for pair in zip(ours, theirs)]
    return max(abs(one - other) / abs(other) for one, other in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=pathlib.Path, default=REPOSITORY / "target/release/trainer")
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("flags", nargs="*", help="for the trainer, after --")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    print("| model | rate | iteration | error | allowed | mistakes |\n|---|---|---|---|---|---|")
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            torch.manual_seed(SEED)
            write_random_model(CONFIGS[family], folder)
            ids, targets = random_batches()
            rows = dict(input_ids=ids, targets=targets)
            save_file({name: tensor.reshape(-1, SEQ).to(torch.int32).contiguous() for name, tensor in rows.items()},
                      folder / "batches.safetensors")
            for adjust in ("match_rms_adamw", "original"):
                for dtype, allowed in TOLERANCES.items():
                    found = ours(arguments.trainer, folder, adjust, dtype, arguments.flags)
                    error = distance(found, train(folder, ids, targets, adjust, dtype))
                    # The longer side is the longer side of the transposed matrix, too.
                    mistakes = ["no nesterov"] + ["transposed"] * (adjust == "original") + ["fused"] * (family != "gpt2")
                    broken = {name: distance(found, train(folder, ids, targets, adjust, dtype, name)) for name in mistakes}
                    failed |= error > allowed or min(broken.values()) < 2 * allowed
                    listed = ", ".join(f"{name} {value:.1e}" for name, value in broken.items())
                    print(f"| {family} | {adjust} | {dtype} | {error:.1e} | {allowed:.0e} | {listed} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
