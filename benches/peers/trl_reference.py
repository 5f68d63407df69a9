#!/usr/bin/env python3
"""Trains on preferences with Hugging Face's TRL, from token ids, and writes what its DPOTrainer computed, so that the trainer can be
held against it.

  eval "$(benches/peers/setup_torch)"; $PEER_PYTHON -m pip install trl==1.16.0
  LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON benches/peers/trl_reference.py OUT

OUT/reference.json has the pairs, the settings, and loss, gradient norm and rewards of five steps of two runs in f32 on one thread:
`adapter`, of the adapter in `tests/golden/peft/llama/start` with the model without it as reference, and `whole`, of the model in
`tests/golden/transformers/llama` itself. `crates/trainer/tests/golden/trl/` is its output.
"""
import json
import pathlib
import random
import sys
import tempfile

import peft
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.utils.data import SequentialSampler

import transformers_reference as reference

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "crates/trainer/tests/golden"
BETA, STEPS, ACCUM, PAIRS, LONGEST = 0.3, 5, 2, 2, 19
OPTIMIZER = reference.OPTIMIZER


def pairs():
    """Prompts and answers of random lengths: the two answers to a prompt too."""
    numbers = random.Random(reference.SEED)
    def ids(least, most):
        return [numbers.randrange(1, reference.VOCAB) for _ in range(numbers.randint(least, most))]
    return [dict(prompt_ids=ids(1, 8), chosen_ids=ids(1, LONGEST - 8), rejected_ids=ids(1, LONGEST - 8))
            for _ in range(STEPS * ACCUM * PAIRS)]


class Recorded(trl.DPOTrainer):
    """Takes token ids as they are, in order, and keeps the loss of every micro-batch, which logs round."""

    losses: list

    def _prepare_dataset(self, dataset, *_):
        return dataset

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    def compute_loss(self, *arguments, **named):
        loss = super().compute_loss(*arguments, **named)
        self.losses.append(loss.item())
        return loss


def train(model, out):
    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(reference.VOCAB)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="1")
    arguments = trl.DPOConfig(
        output_dir=out, beta=BETA, max_length=None, max_steps=STEPS, per_device_train_batch_size=PAIRS,
        gradient_accumulation_steps=ACCUM, learning_rate=OPTIMIZER["lr"], lr_scheduler_type="constant",
        adam_beta1=OPTIMIZER["betas"][0], adam_beta2=OPTIMIZER["betas"][1], adam_epsilon=OPTIMIZER["eps"],
        weight_decay=OPTIMIZER["weight_decay"], max_grad_norm=OPTIMIZER["clip_grad_norm"], optim="adamw_torch", bf16=False,
        gradient_checkpointing=False, use_cpu=True, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True)
    trainer = Recorded(model=model, args=arguments, train_dataset=Dataset.from_list(pairs()), processing_class=tokenizer)
    trainer.losses = []
    if isinstance(trainer.model, peft.PeftModel) and "ref" in trainer.model.peft_config:
        # TRL takes a copy of the adapter as reference; here it is the model without one.
        trainer.model.delete_adapter("ref")
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    micro = zip(*[iter(trainer.losses)] * ACCUM, strict=True)
    names = dict(rewards_chosen="rewards/chosen", rewards_rejected="rewards/rejected", rewards_accuracy="rewards/accuracies")
    return [dict(step=step + 1, loss=sum(losses) / ACCUM, grad_norm=log["grad_norm"],
                 **{ours: log[theirs] for ours, theirs in names.items()})
            for step, (losses, log) in enumerate(zip(micro, logs, strict=True))]


def main():
    torch.set_num_threads(1)
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    load = lambda: reference.load(GOLDEN / "transformers/llama")
    adapted = peft.PeftModel.from_pretrained(load(), GOLDEN / "peft/llama/start", is_trainable=True)
    with tempfile.TemporaryDirectory() as scratch:
        runs = dict(adapter=train(adapted, scratch), whole=train(load(), scratch))
    settings = dict(made_with=f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, CPU f32",
                    beta=BETA, accum=ACCUM, pairs_of_micro_batch=PAIRS, optimizer=OPTIMIZER, pairs=pairs())
    (out / "reference.json").write_text(json.dumps(settings | runs) + "\n")
    for name, steps in runs.items():
        print(name, *(f"{step['loss']:.7f} {step['grad_norm']:.6f}" for step in steps))


main()
