#!/usr/bin/env python3
"""Compares `--optimizer muon` and `--optimizer adafactor` with `torch.optim`'s, on transformers' Llama, Qwen3 and GPT-2:
loss and gradient norm of five steps with clipping. Beside Muon, AdamW updates embeddings, head and vectors.

  eval "$(benches/peers/setup_torch)"
  LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON benches/peers/optimizer_compare.py [--trainer PATH] [-- TRAINER FLAGS]

Muon's iteration in f32 is PyTorch's own function with its cast to bf16 taken out. Of Adafactor, `bf16` says that gradients are
kept in bf16, as `--grad-dtype bf16` keeps them. Mistakes are made on purpose, and have to be beyond the tolerance: for Muon no
Nesterov, shapes that are transposed, and for Llama q, k and v as one matrix; for Adafactor updates that are not clipped, steps
that do not go by the size of the weights, and q, k and v as one matrix. Prints a table of the largest relative errors, and exits
1 if one is beyond its tolerance or a mistake is within it.
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
BF16, ADJUST_LR = _muon._zeropower_via_newtonschulz, _muon._adjust_lr


def without_cast():
    """PyTorch's iteration in f32."""
    source = inspect.getsource(BF16)
    assert source.count(".bfloat16()") == 1, source
    scope = dict(vars(_muon))
    exec(source.replace(".bfloat16()", ".clone()"), scope)
    return scope["_zeropower_via_newtonschulz"]


ITERATIONS = dict(f32=without_cast(), bf16=BF16)


class Fused(torch.optim.Optimizer):
    """An optimizer for q, k and v of each layer as if they were one matrix: a mistake."""

    def __init__(self, triples, optimizer, **options):
        super().__init__([parameter for triple in triples for parameter in triple], {})
        self.triples = triples
        self.joined = [torch.nn.Parameter(torch.cat([p.detach() for p in triple])) for triple in triples]
        self.optimizer = optimizer(self.joined, **options)

    def step(self):
        for joined, triple in zip(self.joined, self.triples):
            joined.grad = torch.cat([parameter.grad for parameter in triple])
        self.optimizer.step()
        for joined, triple in zip(self.joined, self.triples):
            for parameter, part in zip(triple, joined.detach().split([p.shape[0] for p in triple])):
                parameter.data.copy_(part)


def take_triples(matrices):
    """q, k and v of each layer, out of some matrices by name."""
    layers = sorted({name.split("q_proj")[0] for name in matrices if "q_proj" in name})
    return [[matrices.pop(f"{layer}{part}_proj.weight") for part in "qkv"] for layer in layers]


def by_decay(parameters):
    """Matrices decay, vectors do not."""
    return [dict(params=[p for p in parameters if p.ndim >= 2], weight_decay=OPTIMIZER["weight_decay"]),
            dict(params=[p for p in parameters if p.ndim < 2], weight_decay=0.0)]


class Muon:
    """Muon for matrices of the blocks, AdamW for the rest."""
    lr = 2e-3
    variants = [dict(adjust=adjust, dtype=dtype) for adjust in ("match_rms_adamw", "original") for dtype in TOLERANCES]

    def __init__(self, adjust, dtype):
        self.adjust, self.dtype = adjust, dtype
        self.name = f"Muon, {adjust}, {dtype}"
        self.flags = ["--set", f"optim.ns_dtype={dtype}", "--set", f"optim.lr_adjust={adjust}"]

    def mistakes(self, family):
        # Transposing does not change which length is the longer side.
        return ["no nesterov"] + ["transposed"] * (self.adjust == "original") + ["fused"] * (family != "gpt2")

    def optimizers(self, model, mistake):
        adjust_lr = ADJUST_LR
        if mistake == "transposed":
            adjust_lr = lambda lr, name, shape: ADJUST_LR(lr, name, shape[::-1])
        _muon._adjust_lr = adjust_lr
        _muon._zeropower_via_newtonschulz = ITERATIONS[self.dtype]
        hidden = {name: p for name, p in model.named_parameters() if p.ndim == 2 and (".layers." in name or ".h." in name)}
        rest = [p for name, p in model.named_parameters() if name not in hidden]
        adamw = torch.optim.AdamW(by_decay(rest), lr=self.lr, betas=OPTIMIZER["betas"], eps=OPTIMIZER["eps"])
        options = dict(lr=self.lr, weight_decay=OPTIMIZER["weight_decay"], adjust_lr_fn=self.adjust,
                       nesterov=mistake != "no nesterov")
        fused = [Fused(take_triples(hidden), torch.optim.Muon, **options)] if mistake == "fused" else []
        return [torch.optim.Muon(list(hidden.values()), **options), adamw, *fused]

    def kept(self, gradient):
        return gradient


class Adafactor:
    """Adafactor for all parameters."""
    lr = 2e-2
    variants = [dict(dtype=dtype) for dtype in TOLERANCES]

    def __init__(self, dtype):
        self.dtype = dtype
        self.name = f"Adafactor, {dtype}"
        self.flags = ["--grad-dtype", dtype]

    def mistakes(self, family):
        return ["not clipped", "not relative"] + ["fused"] * (family != "gpt2")

    def optimizers(self, model, mistake):
        options = dict(lr=self.lr, d=1e9 if mistake == "not clipped" else 1.0)
        if mistake == "not relative":
            options["eps"] = (None, 1.0)
        named = dict(model.named_parameters())
        decay = OPTIMIZER["weight_decay"]
        fused = [Fused(take_triples(named), torch.optim.Adafactor, weight_decay=decay, **options)] if mistake == "fused" else []
        return [torch.optim.Adafactor(by_decay(list(named.values())), **options), *fused]

    def kept(self, gradient):
        return gradient.to(dict(f32=torch.float32, bf16=torch.bfloat16)[self.dtype]).float()


def train(folder, ids, targets, variant, mistake=None):
    """Loss and gradient norm of every step."""
    model = load(folder)
    all_of = variant.optimizers(model, mistake)
    steps = []
    for step_ids, step_targets in zip(ids, targets):
        count, loss = int((step_targets != MASKED).sum()), 0.0
        for micro_ids, micro_targets in zip(step_ids, step_targets):
            part = model(input_ids=micro_ids, labels=micro_targets, shift_labels=micro_targets,
                         num_items_in_batch=count).loss
            part.backward()
            for parameter in model.parameters():
                parameter.grad = variant.kept(parameter.grad)
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), OPTIMIZER["clip_grad_norm"]).item()
        for optimizer in all_of:
            optimizer.step()
        model.zero_grad()
        steps.append((loss, norm))
    return steps


def ours(trainer, folder, variant, flags):
    with tempfile.TemporaryDirectory() as out:
        command = [trainer, "train", "--init-from", folder, "--data", folder / "batches.safetensors", "--no-shuffle",
                   "--micro-batch", MICRO_BATCH, "--accum", ACCUM, "--steps", STEPS, "--lr", variant.lr,
                   "--optimizer", variant.name.split(",")[0].lower(), *variant.flags, "--out", f"{out}/run",
                   "--device", "cpu", "--dtype", "f32", "--save-every", 0, "--quiet", *flags]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        records = map(json.loads, pathlib.Path(out, "run/metrics.jsonl").read_text().splitlines())
        return [(record["loss"], record["grad_norm"]) for record in records if record["kind"] == "step"]


OPTIMIZERS = dict(muon=Muon, adafactor=Adafactor)


def distance(found, expected):
    """The largest relative error of any figure."""
    pairs = [pair for ours, theirs in zip(found, expected, strict=True) for pair in zip(ours, theirs)]
    return max(abs(one - other) / abs(other) for one, other in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=pathlib.Path, default=REPOSITORY / "target/release/trainer")
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("flags", nargs="*", help="for the trainer, after --")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [OPTIMIZERS[name] for name in arguments.optimizers]
    failed = False
    print("| optimizer | model | error | allowed | mistakes |\n|---|---|---|---|---|")
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            torch.manual_seed(SEED)
            write_random_model(CONFIGS[family], folder)
            ids, targets = random_batches()
            rows = dict(input_ids=ids, targets=targets)
            save_file({name: tensor.reshape(-1, SEQ).to(torch.int32).contiguous() for name, tensor in rows.items()},
                      folder / "batches.safetensors")
            for variant in (kind(**options) for kind in kinds for options in kind.variants):
                allowed = TOLERANCES[variant.dtype]
                found = ours(arguments.trainer, folder, variant, arguments.flags)
                error = distance(found, train(folder, ids, targets, variant))
                broken = {name: distance(found, train(folder, ids, targets, variant, name)) for name in variant.mistakes(family)}
                failed |= error > allowed or min(broken.values()) < 2 * allowed
                listed = ", ".join(f"{name} {value:.1e}" for name, value in broken.items())
                print(f"| {variant.name} | {family} | {error:.1e} | {allowed:.0e} | {listed} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
