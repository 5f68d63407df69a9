"""Fine-tunes a model from a folder on batches of a torch DataLoader: python finetune_with_dataloader.py MODEL OUT"""
import sys

import torch
import trainer
from torch.utils.data import DataLoader, TensorDataset

model_folder, out = sys.argv[1:]
SEQ = 64

# Any DataLoader will do: this one has rows that count from a random token, and learns the second half of each.
first = torch.randint(0, 256, (1024, 1), generator=torch.Generator().manual_seed(1))
rows = (first + torch.arange(SEQ)) % 256
labels = rows.clone()
labels[:, :SEQ // 2] = -100
loader = DataLoader(TensorDataset(rows, labels), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(2))

with trainer.Trainer(init_from=model_folder, seq=SEQ, micro_batch=8, accum=2, lr=3e-3, steps=len(loader), warmup=4) as model:
    for batch_rows, batch_labels in loader:
        record = model.step(batch_rows, batch_labels)
        print(f"step {record['step']} loss {record['loss']:.4f} peak {record['peak_bytes']} planned {record['planned_peak_bytes']}")
    model.export(out)
