"""Fails if the peak of a training step grew by more than 1 %. BASE is the snapshot of the branch that it goes into."""
import os
import subprocess

import torch
from cpu_snapshot import cpu_snapshot
from my_model import train_step  # makes the model, and runs a step or two


def record(file):
    if not torch.cuda.is_available():
        with cpu_snapshot(file):
            return train_step("cpu")
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    train_step("cuda")
    torch.cuda.memory._dump_snapshot(file)


def test_peak():
    record("new.pickle")
    if base := os.environ.get("BASE"):
        subprocess.run(["trainer", "check", base, "new.pickle", "--tolerance", "1%"], check=True)
