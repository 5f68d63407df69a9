#!/usr/bin/env python3
"""Writes what Hugging Face transformers generates greedily from the models of tests/golden/transformers: `greedy.json`
beside each.

  eval "$(benches/peers/setup_torch)"
  LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON benches/peers/greedy_reference.py crates/trainer/tests/golden/transformers

A prompt is the beginning of a row of the first batch; `margin` is how far, at the closest decision, the likeliest token's
logit is above the next one's.
"""
import json
import pathlib
import sys

import torch

from transformers_reference import load

PROMPTS, NEW = [1, 5, 16, 18], 12


def continuation(model, prompt):
    """The text after a prompt, and the smallest margin."""
    tokens, margin = list(prompt), float("inf")
    made = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                          max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].tolist()
    for _ in range(NEW):
        with torch.no_grad():
            top = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        margin = min(margin, (top.values[0] - top.values[1]).item())
        tokens.append(top.indices[0].item())
    assert tokens == made, "generate() and the largest logit differ"
    return tokens[len(prompt):], margin


def main():
    for folder in sorted(path for path in pathlib.Path(sys.argv[1]).iterdir() if path.is_dir()):
        model = load(folder).eval()
        reference = json.loads((folder / "reference.json").read_text())
        rows = [row for micro_batch in reference["input_ids"][0] for row in micro_batch]
        prompts = [rows[index % len(rows)][:length] for index, length in enumerate(PROMPTS)]
        made = [continuation(model, prompt) for prompt in prompts]
        record = {"prompts": prompts, "continuations": [tokens for tokens, _ in made],
                  "margin": min(margin for _, margin in made)}
        (folder / "greedy.json").write_text(json.dumps(record) + "\n")
        print(folder.name, record["margin"], record["continuations"])


main()
