#!/usr/bin/env python3
"""Trains the models that transformers_reference.py wrote with the trainer, and compares: loss and gradient norm of every
step, the first step's gradients, and the logits that transformers computes with what each side trained.

  eval "$(benches/peers/setup_torch)"
  LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON benches/peers/transformers_compare.py [--families llama gpt2] [-- TRAINER FLAGS]

Prints a table of relative errors and exits 1 if one is beyond its tolerance, or if the trainer refuses a model. Flags
after `--` go to the trainer: `-- --recompute full --attention flash` has to pass, `-- --set optim.weight_decay=0.2` to fail.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file

from transformers_reference import CONFIGS, gradient_distance, load

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TOLERANCES = dict(loss=1e-5, grad_norm=1e-5, gradients=1e-4, logits=1e-4)


class Refused(Exception):
    """The trainer did not train a model."""


def train(trainer, reference, settings, out, flags):
    """Repeats the reference's steps with the trainer."""
    command = [trainer, "train", "--init-from", reference, "--data", reference / "batches.safetensors", "--no-shuffle",
               "--micro-batch", settings["micro_batch"], "--accum", settings["accum"], "--steps", len(settings["steps"]),
               "--lr", settings["optimizer"]["lr"], "--dump-gradients", 1, "--save-final", out / "final", "--out", out,
               "--device", "cpu", "--dtype", "f32", "--quiet", *flags]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if result.returncode:
        raise Refused(f"exit code {result.returncode}: {result.stderr.strip().splitlines()[0]}")


def largest_error(found, expected, key):
    pairs = list(zip(found, expected, strict=True))
    assert all(ours["tokens"] == theirs["target_tokens"] for ours, theirs in pairs), "other batches"
    return max(abs(ours[key] - theirs[key]) / abs(theirs[key]) for ours, theirs in pairs)


def logits(folder, batches, weights=None):
    """Of all batches, by transformers with the model in a folder, or with other weights in it."""
    model = load(folder).eval()
    if weights:
        missing, unexpected = model.load_state_dict(load_file(weights), strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    with torch.no_grad():
        return model(input_ids=batches["input_ids"].long()).logits


def compare(trainer, reference, flags):
    """The largest relative error of every figure."""
    settings = json.loads((reference / "reference.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "run"
        train(trainer, reference, settings, out, flags)
        records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        steps = [record for record in records if record["kind"] == "step"]
        gradients = load_file(out / "gradients" / "step-1.safetensors")
        batches = load_file(reference / "batches.safetensors")
        ours = logits(out / "final", batches)
    untrained, theirs = (logits(reference, batches, weights) for weights in (None, reference / "model_final.safetensors"))
    scale = theirs.abs().max()
    assert (untrained - theirs).abs().max() / scale > 100 * TOLERANCES["logits"], "training moved nothing"
    return dict(loss=largest_error(steps, settings["steps"], "loss"),
                grad_norm=largest_error(steps, settings["steps"], "grad_norm"),
                gradients=gradient_distance(gradients, load_file(reference / "grads_step0.safetensors")),
                logits=float((ours - theirs).abs().max() / scale))


def row(family, trainer, reference, flags):
    """A family's line of the table, and whether all is within tolerance."""
    try:
        errors = compare(trainer, reference, flags)
    except Refused as refused:
        return f"| {family} | failed: {refused} |" + " |" * len(TOLERANCES), False
    beyond = [name for name, tolerance in TOLERANCES.items() if not errors[name] <= tolerance]
    cells = " | ".join(f"{errors[name]:.1e}" for name in TOLERANCES)
    return f"| {family} | {cells} | {'beyond: ' + ', '.join(beyond) if beyond else 'agrees'} |", not beyond


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=pathlib.Path, default=REPOSITORY / "target/release/trainer")
    parser.add_argument("--reference", type=pathlib.Path, default=REPOSITORY / "crates/trainer/tests/golden/transformers",
                        help="what transformers_reference.py wrote")
    parser.add_argument("--families", nargs="+", default=list(CONFIGS), choices=CONFIGS)
    parser.add_argument("flags", nargs="*", metavar="TRAINER FLAGS")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| relative error | " + " | ".join(TOLERANCES) + " | |\n|---|" + "---:|" * len(TOLERANCES) + "---|")
    agrees = True
    for family in arguments.families:
        line, within = row(family, arguments.trainer.resolve(), arguments.reference / family, arguments.flags)
        agrees &= within
        print(line, flush=True)
    sys.exit(not agrees)


if __name__ == "__main__":
    main()
