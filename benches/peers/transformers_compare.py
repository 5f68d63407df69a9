#!/usr/bin/env python3
"""Trains the models that transformers_reference.py wrote with the trainer, and compares: loss and gradient norm of every
step, the first step's gradients, and the logits that transformers computes with what each side trained. Then exports the
checkpoint, whole and in shards, and holds what transformers loads against the model that was trained: configuration,
tokenizer, chat template, weights to the bit, logits, and text.

  eval "$(benches/peers/setup_torch)"
  LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON benches/peers/transformers_compare.py [--families llama gpt2] [-- TRAINER FLAGS]

Prints a table of relative errors and exits 1 if one is beyond its tolerance, if an export is not the model, or if the
trainer refuses one. Flags
after `--` go to the trainer: `-- --recompute full --attention flash` has to pass, `-- --set optim.weight_decay=0.2` to fail.
"""
import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from transformers_reference import CONFIGS, VOCAB, gradient_distance, in_memory, load, without

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TOLERANCES = dict(loss=1e-5, grad_norm=1e-5, gradients=1e-4, logits=1e-4)


class Refused(Exception):
    """A command of the trainer failed."""


def run(*command):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if result.returncode:
        raise Refused(f"exit code {result.returncode}: {result.stderr.strip().splitlines()[0]}")


def with_companions(reference, folder):
    """A copy of a reference's model as it might be published: with a tokenizer, a chat template and settings for
    generation, and an unknown key in its `config.json`."""
    folder.mkdir()
    shutil.copy(reference / "model.safetensors", folder)
    config = json.loads((reference / "config.json").read_text()) | dict(unheard_of=dict(deep=[1, None, 2.5]))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    words = {f"w{index}": index for index in range(VOCAB - 1)} | {"<end>": VOCAB - 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="w0", eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }} {{ message.content }} <end>{% endfor %}"
    tokenizer.save_pretrained(folder)
    GenerationConfig(max_new_tokens=12, repetition_penalty=1.5).save_pretrained(folder)
    return folder


def train(trainer, reference, model, settings, out, flags):
    """Repeats the reference's steps with the trainer."""
    run(trainer, "train", "--init-from", model, "--data", reference / "batches.safetensors", "--no-shuffle",
        "--micro-batch", settings["micro_batch"], "--accum", settings["accum"], "--steps", len(settings["steps"]),
        "--lr", settings["optimizer"]["lr"], "--dump-gradients", 1, "--save-final", out / "final", "--out", out,
        "--save-every", len(settings["steps"]), "--device", "cpu", "--dtype", "f32", "--quiet",
        *(["--packing", "pad"] if "lengths" in settings else []), *flags)


def published(folder):
    """All that transformers' own classes read from a model's folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager", local_files_only=True)
    model.config._experts_implementation = "eager"
    # The folder's name is allowed to differ.
    config = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict() | dict(_name_or_path="")
    chat = tokenizer.apply_chat_template([dict(role="w1", content="w7 w9")], tokenize=False)
    ids = tokenizer(chat, return_tensors="pt").input_ids
    with torch.no_grad():
        logits, text = model.eval()(input_ids=ids).logits, tokenizer.decode(model.generate(ids, do_sample=False)[0])
    return dict(config=config, generation=model.generation_config.to_dict(), chat=chat, weights=model.state_dict(),
                logits=logits, text=text)


def differences(found, expected):
    """The differences of two models. Logits may differ in the last bits: products depend on the alignment of weights in
    memory, which is that of the file."""
    def same(key):
        ours, theirs = found[key], expected[key]
        if key == "weights":
            return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        return torch.allclose(ours, theirs, rtol=0, atol=1e-6 * float(theirs.abs().max())) if key == "logits" else ours == theirs
    return [key for key in expected if not same(key)]


def export_differences(trainer, model, trained, out):
    """The differences of the trainer's exports, each with the export's name."""
    weights, folder = load_file(trained / "model.safetensors"), out / "expected"
    shutil.copytree(model, folder)
    shutil.copy(trained / "model.safetensors", folder)
    # What was read as codes is trained and written as plain weights.
    config = without(json.loads((folder / "config.json").read_text()), "quantization_config")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    expected = published(folder)
    assert expected["config"]["unheard_of"] and len(set(expected["text"].split("w"))) > 3, expected["text"]
    largest = max(tensor.nbytes for tensor in weights.values())
    ways = dict(final=[], whole=[], sharded=["--max-shard-size", largest])
    for name, flags in ways.items():
        if name != "final":
            run(trainer, "export", out, "--out", out / name, *flags)
        assert (out / name / "model.safetensors.index.json").exists() == (name == "sharded")
    checkpoint, = (out / "checkpoints").iterdir()
    folders = {name: out / name for name in ways} | dict(checkpoint=checkpoint)
    return [f"{name}: {what}" for name, path in folders.items() for what in differences(published(path), expected)]


def largest_error(found, expected, key):
    pairs = list(zip(found, expected, strict=True))
    assert all(ours["tokens"] == theirs["target_tokens"] for ours, theirs in pairs), "other batches"
    return max(abs(ours[key] - theirs[key]) / abs(theirs[key]) for ours, theirs in pairs)


def logits(folder, batches, family, weights=None):
    """Losses of all batches, by transformers with the model in a folder, or with other weights in it."""
    model = load(folder).eval()
    if weights:
        missing, unexpected = model.load_state_dict(in_memory(load_file(weights), family), strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    with torch.no_grad():
        return model(input_ids=batches["input_ids"].long()).logits


def compare(trainer, reference, flags):
    """The largest relative error of every figure."""
    settings = json.loads((reference / "reference.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        out, model = pathlib.Path(folder) / "run", with_companions(reference, pathlib.Path(folder) / "model")
        train(trainer, reference, model, settings, out, flags)
        records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        steps = [record for record in records if record["kind"] == "step"]
        gradients = load_file(out / "gradients" / "step-1.safetensors")
        batches = load_file(reference / "batches.safetensors")
        ours = logits(out / "final", batches, reference.name)
        exports = export_differences(trainer, model, out / "final", out)
    untrained, theirs = (logits(reference, batches, reference.name, weights) for weights in (None, reference / "model_final.safetensors"))
    scale = theirs.abs().max()
    assert (untrained - theirs).abs().max() / scale > 100 * TOLERANCES["logits"], "training moved nothing"
    return exports, dict(loss=largest_error(steps, settings["steps"], "loss"),
                         grad_norm=largest_error(steps, settings["steps"], "grad_norm"),
                         gradients=gradient_distance(gradients, load_file(reference / "grads_step0.safetensors")),
                         logits=float((ours - theirs).abs().max() / scale))


def row(family, trainer, reference, flags):
    """A family's line of the table, and whether all is within tolerance."""
    try:
        exports, errors = compare(trainer, reference, flags)
    except Refused as refused:
        return f"| {family} | failed: {refused} |" + " |" * (len(TOLERANCES) + 1), False
    beyond = [name for name, tolerance in TOLERANCES.items() if not errors[name] <= tolerance]
    cells = [f"{errors[name]:.1e}" for name in TOLERANCES] + ["differs in " + ", ".join(exports) if exports else "same"]
    verdict = "beyond: " + ", ".join(beyond) if beyond else "agrees"
    return f"| {family} | {' | '.join(cells)} | {verdict} |", not beyond and not exports


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=pathlib.Path, default=REPOSITORY / "target/release/trainer")
    parser.add_argument("--reference", type=pathlib.Path, default=REPOSITORY / "crates/trainer/tests/golden/transformers",
                        help="what transformers_reference.py wrote")
    parser.add_argument("--families", nargs="+", default=list(CONFIGS), choices=CONFIGS)
    parser.add_argument("flags", nargs="*", metavar="TRAINER FLAGS")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| relative error | " + " | ".join(TOLERANCES) + " | exports | |\n|---|" + "---:|" * len(TOLERANCES) + "---|---|")
    agrees = True
    for family in arguments.families:
        line, within = row(family, arguments.trainer.resolve(), arguments.reference / family, arguments.flags)
        agrees &= within
        print(line, flush=True)
    sys.exit(not agrees)


if __name__ == "__main__":
    main()
