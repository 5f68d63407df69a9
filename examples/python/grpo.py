"""GRPO on a toy reward, on the CPU, in seconds: the share of a text's tokens that are even. python grpo.py [SEED]"""
import random
import statistics
import sys

import trainer

STEPS, PROMPTS, GROUP, NEW = 100, 4, 8, 12
ROWS = PROMPTS * GROUP


def reward(tokens):
    return sum(token % 2 == 0 for token in tokens) / NEW


def advantages_of(rewards):
    """How much better each text of a group is than the group's mean, in standard deviations."""
    deviation = statistics.pstdev(rewards)
    return [(one - statistics.mean(rewards)) / (deviation + 1e-4) for one in rewards]


def main(seed=0):
    draw = random.Random(seed)
    with trainer.Trainer(config="tiny", device="cpu", objective="policy", seq=15, micro_batch=ROWS, accum=1, seed=seed, lr=1e-3, schedule="constant",
                         warmup=1, steps=STEPS, generate=(ROWS, 16)) as model:
        for step in range(STEPS):
            prompts = [[draw.randrange(256) for _ in range(4)] for _ in range(PROMPTS)]
            prompts = [prompt for prompt in prompts for _ in range(GROUP)]
            texts = model.generate(prompts, NEW, seed=seed * STEPS + step, ends=[])
            rewards = [reward(text) for text in texts]
            groups = [rewards[first:first + GROUP] for first in range(0, ROWS, GROUP)]
            ids = [prompt + text for prompt, text in zip(prompts, texts)]
            mask = [[0] * 4 + [1] * NEW] * ROWS
            old = model.log_probs(ids)
            advantages = [one for group in groups for one in advantages_of(group)]
            record = model.policy_step(ids, mask, advantages, old, clip=0.2, loss="grpo")
            if step % 10 == 0 or step == STEPS - 1:
                print(f"step {step + 1} reward {statistics.mean(rewards):.3f} norm {record['grad_norm']:.3f} peak {record['peak_bytes']}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
