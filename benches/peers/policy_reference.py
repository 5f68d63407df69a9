#!/usr/bin/env python3
"""Trains a policy with the losses of TRL's GRPOTrainer, written out in PyTorch, so that the trainer can be held against them.

  eval "$(benches/peers/setup_torch)"; LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON benches/peers/policy_reference.py OUT

OUT/reference.json has the rows, the settings, and loss, gradient norm, distance from the reference and share of clipped targets of five
steps in f32 on one thread, of the model in `tests/golden/transformers/llama`, for each loss with and without a reference.
`crates/trainer/tests/golden/policy/` is its output.
"""
import json
import pathlib
import sys

import torch
import transformers

import transformers_reference as reference

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "crates/trainer/tests/golden"
STEPS, ROWS, SEQ, LONGEST, MASKED = 5, 4, reference.SEQ, 12, reference.MASKED
CLIP_LOW, CLIP_HIGH, BETA = 0.1, 0.15, 0.3
KINDS = ["grpo", "dr_grpo", "gspo", "ppo"]
OPTIMIZER = reference.OPTIMIZER


def log_probs(model, ids, targets):
    logits = model(input_ids=ids).logits
    chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (chosen - logits.logsumexp(-1)) * (targets != MASKED)


def data(model):
    """Prompts and completions of different lengths; one row of the last step has no completion. The old policy is near the model that
    training begins with, and that model is the reference."""
    torch.manual_seed(reference.SEED)
    tokens = torch.randint(0, reference.VOCAB, (STEPS, ROWS, SEQ + 1))
    ids, targets = tokens[..., :-1].clone(), tokens[..., 1:].clone()
    for number, row in enumerate(targets.view(-1, SEQ)):
        prompt, completion = 2 + number % 6, 1 + number * 5 % LONGEST
        row[:prompt] = MASKED
        row[prompt + completion:] = MASKED
    targets[-1, 1] = MASKED
    with torch.no_grad():
        began = torch.stack([log_probs(model, *step) for step in zip(ids, targets)])
    old = (began + 0.3 * torch.randn(began.shape)) * (targets != MASKED)
    return ids, targets, torch.randn(STEPS, ROWS), old, began


def loss_of(kind, beta, log_probs, mask, advantages, old, began):
    """The step's loss as TRL's `_compute_loss` has it, with the distance from the reference and the share that is clipped."""
    apart = began - log_probs
    kl = torch.exp(apart) - apart - 1
    of_row = mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = log_probs - old
    if kind == "gspo":
        ratio = (ratio * mask).sum(-1, keepdim=True) / of_row
    ratio, advantages = torch.exp(ratio), advantages.unsqueeze(-1)
    clipped = torch.clamp(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
    of_token = -torch.min(ratio * advantages, clipped * advantages)
    if beta > 0:
        of_token = of_token + beta * kl
    weights = mask / dict(grpo=of_row * ROWS, gspo=of_row * ROWS, dr_grpo=ROWS * LONGEST, ppo=mask.sum())[kind]
    is_clipped = ((ratio < 1 - CLIP_LOW) & (advantages < 0)) | ((ratio > 1 + CLIP_HIGH) & (advantages > 0))
    mean = lambda x: float((x * weights).sum().detach() / weights.sum())
    return (of_token * weights).sum(), mean(kl), mean(is_clipped.float())


def train(kind, beta, steps):
    model = reference.load(GOLDEN / "transformers/llama")
    decay = {True: [], False: []}
    for parameter in model.parameters():
        decay[parameter.ndim >= 2].append(parameter)
    groups = [dict(params=decay[True], weight_decay=OPTIMIZER["weight_decay"]), dict(params=decay[False], weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, lr=OPTIMIZER["lr"], betas=OPTIMIZER["betas"], eps=OPTIMIZER["eps"])
    made = []
    for ids, targets, advantages, old, began in zip(*steps):
        mask = (targets != MASKED).float()
        loss, kl, clip_share = loss_of(kind, beta, log_probs(model, ids, targets), mask, advantages, old, began)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad_norm"]).item()
        adamw.step()
        adamw.zero_grad()
        made.append(dict(loss=loss.item(), grad_norm=norm, kl=kl, clip_share=clip_share))
    return dict(kind=kind, beta=beta, steps=made)


def main():
    torch.set_num_threads(1)
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    steps = data(reference.load(GOLDEN / "transformers/llama"))
    runs = [train(kind, beta, steps) for kind in KINDS for beta in (0.0, BETA)]
    names = ["ids", "targets", "advantages", "old", "began"]
    settings = dict(made_with=f"transformers {transformers.__version__}, torch {torch.__version__}, CPU f32", optimizer=OPTIMIZER,
                    clip_low=CLIP_LOW, clip_high=CLIP_HIGH, longest=LONGEST, rows=ROWS, seq=SEQ)
    tensors = {name: tensor.tolist() for name, tensor in zip(names, steps, strict=True)}
    (out / "reference.json").write_text(json.dumps(settings | tensors | dict(runs=runs)) + "\n")
    for run in runs:
        print(run["kind"], run["beta"], *(f"{step['loss']:.7f} {step['grad_norm']:.6f} {step['clip_share']:.2f}" for step in run["steps"]))


main()
