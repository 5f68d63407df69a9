#!/usr/bin/env python3
"""Writes folders that Hugging Face's transformers saved in NF4 (bitsandbytes, with double quantisation), of the small models of
transformers_reference.py, and what their codes stand for, so that the trainer can be held against them.

  eval "$(benches/peers/setup_torch)"
  LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON benches/peers/quantised_folders.py OUT

OUT/FAMILY is the folder, in shards for Llama, with blocks of modules left out for GPT-2. OUT/FAMILY/values.json has the CRC-32 of
each matrix as f32, in the way products use it, and the loss of a plain f32 model with these values on the first batch.
`crates/trainer/tests/golden/quantised/` is its output. It needs no network.
"""
import json
import pathlib
import sys
import zlib

import bitsandbytes
import torch
import transformers
from bitsandbytes import functional

import transformers_reference as reference

MODELS = pathlib.Path(__file__).resolve().parents[2] / "crates/trainer/tests/golden/transformers"
SKIPPED = {"llama": None, "gpt2": ["lm_head", "transformer.h.1.mlp", "h.0.attn.c_proj"]}
SHARDS = {"llama": "24KB", "gpt2": "5GB"}


def quantised(family):
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=SKIPPED[family])
    return transformers.AutoModelForCausalLM.from_pretrained(
        MODELS / family, quantization_config=how, dtype=torch.float32, device_map="cpu", local_files_only=True)


def values(model):
    """What the codes stand for, by the name of the matrix, in the way products use it."""
    matrices = ((name, module.weight) for name, module in model.named_modules()
                if isinstance(module, bitsandbytes.nn.Linear4bit))
    return {f"{name}.weight": functional.dequantize_4bit(weight.data, weight.quant_state) for name, weight in matrices}


def loss_with(family, found):
    model = reference.load(MODELS / family)
    with torch.no_grad():
        for name, matrix in found.items():
            parameter = model.get_parameter(name)
            is_transposed = isinstance(model.get_submodule(name.removesuffix(".weight")), transformers.pytorch_utils.Conv1D)
            parameter.copy_(matrix.T if is_transposed else matrix)
        settings = json.loads((MODELS / family / "reference.json").read_text())
        ids, targets = (torch.tensor(settings[key][0]) for key in ("input_ids", "targets"))
        count = int((targets != reference.MASKED).sum())
        return sum(model(input_ids=own, labels=labels, shift_labels=labels, num_items_in_batch=count).loss.item()
                   for own, labels in zip(ids, targets))


def main():
    torch.set_num_threads(1)
    for family in SKIPPED:
        folder = pathlib.Path(sys.argv[1]) / family
        model = quantised(family)
        model.save_pretrained(folder, max_shard_size=SHARDS[family])
        (folder / "generation_config.json").unlink(missing_ok=True)
        found = values(model)
        plain = loss_with(family, {})
        loss = loss_with(family, found)
        assert abs(loss - plain) > 1e-4, "the codes change nothing"
        written = {
            "meta": {"bitsandbytes": bitsandbytes.__version__, "transformers": transformers.__version__},
            "crc32": {name: zlib.crc32(matrix.contiguous().numpy().tobytes()) for name, matrix in sorted(found.items())},
            "loss": loss,
        }
        (folder / "values.json").write_text(json.dumps(written, indent=1) + "\n")


main()
