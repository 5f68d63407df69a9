#!/usr/bin/env python3
"""Trains adapters with Hugging Face's PEFT on the small models of transformers_reference.py, and writes what it computed, so
that the trainer can be held against it.

  eval "$(benches/peers/setup_torch)"
  LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON benches/peers/peft_reference.py OUT [--trainer target/release/trainer]

OUT/FAMILY has `start`, the adapter before the first step as PEFT saves it, with factors B that are not zero;
`reference.json`, loss and gradient norm of every step; and `adapter_final.safetensors`, the factors after the last.
`crates/trainer/tests/golden/peft/` is its output. With `--trainer` it repeats the steps with the trainer and compares losses,
gradient norms and final factors; loads what the trainer saved with PEFT, and what it merged with transformers, and compares
logits. It prints the largest relative errors, and exits 1 if one is beyond its tolerance.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import bitsandbytes
import peft
import torch
from peft.optimizers import create_loraplus_optimizer
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

import transformers_reference as reference

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "crates/trainer/tests/golden/transformers"
TOLERANCES = dict(loss=1e-5, grad_norm=1e-5, factors=1e-4, peft_logits=1e-4, merged_logits=1e-4)
ADAPTERS = {
    "llama": dict(target_modules="all-linear", r=4, lora_alpha=8, rank_pattern={"k_proj": 2}, alpha_pattern={"v_proj": 3}),
    "qwen3": dict(target_modules=r".*\.(q_proj|up_proj|down_proj)", r=3, lora_alpha=5, use_rslora=True),
    "gpt2": dict(target_modules=["c_attn", "mlp.c_proj"], r=4, lora_alpha=4, layers_to_transform=[1], fan_in_fan_out=True),
    "deepseek_v2": dict(target_modules=["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], r=3, lora_alpha=6),
    "deepseek_v3": dict(target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"], r=4, lora_alpha=6,
                        rank_pattern={"kv_a_proj_with_mqa": 2}),
    "mixtral": dict(target_modules=["q_proj", "o_proj"], r=2, lora_alpha=5,
                    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
                    rank_pattern={"experts.down_proj": 3}),
    # On a model in NF4 with double quantisation.
    "llama-nf4": dict(target_modules=["q_proj", "v_proj", "down_proj"], r=4, lora_alpha=8),
    # LoRA+.
    "llama-plus": dict(target_modules=["q_proj", "v_proj"], r=2, lora_alpha=2),
}
# The learning rate of factors B over that of factors A.
B_LR_RATIOS = {"llama-plus": 5.0}


def base_of(family):
    return MODELS / family.partition("-")[0]


def load(family):
    """The model under the adapters."""
    model = reference.load(base_of(family))
    return in_nf4(model) if family.endswith("-nf4") else model


def in_nf4(model):
    """The model with the linear layers of its blocks in NF4, quantised by bitsandbytes on the CPU."""
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            quantised = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, bias=module.bias is not None, compute_dtype=torch.float32,
                compress_statistics=True, quant_type="nf4")
            quantised.weight = bitsandbytes.nn.Params4bit(
                module.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", blocksize=64)
            quantised.bias = module.bias
            parent, _, own = name.rpartition(".")
            # In evaluation it would multiply in bf16.
            quantised.support_avx512bf16_for_cpu = False
            setattr(model.get_submodule(parent), own, quantised.to("cpu"))
    model.is_loaded_in_4bit = True
    return model


def start(family):
    """A model with adapters that add something from the first step."""
    torch.manual_seed(reference.SEED)
    model = load(family)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **ADAPTERS[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return model.train()


def train(model, settings, ratio):
    """Loss and gradient norm of every step."""
    optimizer = settings["optimizer"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = dict(lr=optimizer["lr"], betas=optimizer["betas"], eps=optimizer["eps"])
    if ratio == 1.0:
        adamw = torch.optim.AdamW(trained, weight_decay=optimizer["weight_decay"], **numbers)
    else:
        adamw = create_loraplus_optimizer(model, torch.optim.AdamW, loraplus_lr_ratio=ratio,
                                          loraplus_weight_decay=optimizer["weight_decay"], **numbers)
        assert sum(len(group["params"]) for group in adamw.param_groups) == len(trained)
    steps = []
    for ids, targets in zip(torch.tensor(settings["input_ids"]), torch.tensor(settings["targets"])):
        count, loss = int((targets != reference.MASKED).sum()), 0.0
        for micro_ids, micro_targets in zip(ids, targets):
            output = model(input_ids=micro_ids, labels=micro_targets, shift_labels=micro_targets, num_items_in_batch=count)
            added = reference.balance(output, model.config)
            part = output.loss if added is None else output.loss - added
            (part if added is None else part + added / len(ids)).backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, optimizer["clip_grad_norm"]).item()
        adamw.step()
        adamw.zero_grad()
        steps.append(dict(step=len(steps) + 1, loss=loss, grad_norm=norm, target_tokens=count))
    return steps


def save(model, family, folder):
    """The adapter's folder, without what differs from machine to machine and from run to run."""
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text()) | dict(base_model_name_or_path=family)
    for targets in (config["target_modules"], config["target_parameters"]):
        if isinstance(targets, list):
            targets.sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(16).view(1, 16) * 3 % reference.VOCAB).logits


def distance(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def compare(trainer, family, folder, settings, expected):
    """The largest relative errors of the trainer."""
    steps = json.loads((folder / "reference.json").read_text())["steps"]
    with tempfile.TemporaryDirectory() as out:
        out = pathlib.Path(out)
        base = base_of(family)
        codes = ["--base-dtype", "nf4"] if family.endswith("-nf4") else []
        ratio = ["--set", f"lora.b_lr_ratio={B_LR_RATIOS[family]}"] if family in B_LR_RATIOS else []
        run = [trainer, "train", "--init-from", base, "--lora-from", folder / "start", "--data", base / "batches.safetensors",
               "--no-shuffle", "--micro-batch", settings["micro_batch"], "--accum", settings["accum"], "--steps", len(steps),
               "--lr", settings["optimizer"]["lr"], "--save-final", out / "final", "--out", out / "run", "--device", "cpu",
               "--dtype", "f32", "--quiet", *codes, *ratio]
        for command in (run, [trainer, "export", out / "final", "--merge", "--out", out / "merged"]):
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        records = map(json.loads, (out / "run/metrics.jsonl").read_text().splitlines())
        ours = [record for record in records if record["kind"] == "step"]
        def error(key):
            return max(abs(one[key] - other[key]) / abs(other[key]) for one, other in zip(ours, steps, strict=True))
        found, final = load_file(out / "final/adapter_model.safetensors"), load_file(folder / "adapter_final.safetensors")
        assert found.keys() == final.keys(), sorted(found.keys() ^ final.keys())
        loaded = peft.PeftModel.from_pretrained(load(family), out / "final")
        return dict(loss=error("loss"), grad_norm=error("grad_norm"),
                    factors=max(distance(found[name], final[name]) for name in final),
                    peft_logits=distance(logits(loaded), expected),
                    merged_logits=distance(logits(reference.load(out / "merged")), expected))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--trainer", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    is_within = True
    for family in ADAPTERS:
        folder = arguments.out / family
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.loads((base_of(family) / "reference.json").read_text())
        model = start(family)
        before = logits(model)
        model.train()
        save(model, family, folder / "start")
        ratio = B_LR_RATIOS.get(family, 1.0)
        steps = train(model, settings, ratio)
        (folder / "reference.json").write_text(json.dumps(dict(b_lr_ratio=ratio, steps=steps), indent=1) + "\n")
        final = {name: tensor.clone().contiguous() for name, tensor in get_peft_model_state_dict(model).items()}
        save_file(final, folder / "adapter_final.safetensors")
        after = logits(model)
        assert distance(before, after) > 100 * TOLERANCES["peft_logits"], "training moved nothing"
        if arguments.trainer:
            errors = compare(arguments.trainer, family, folder, settings, after)
            is_within &= all(errors[key] <= TOLERANCES[key] for key in errors)
            print(family, *(f"{key} {value:.1e}" for key, value in errors.items()))
    sys.exit(not is_within)


if __name__ == "__main__":
    main()
