"""Trains on a pipeline of Hugging Face datasets: text to rows of several documents. python huggingface_datasets.py OUT"""
import sys

import numpy as np
import trainer
from datasets import Dataset

SEQ, ROWS = 64, 4

# Any dataset of texts; here bytes are the tokens, as those of the preset `tiny`.
texts = Dataset.from_dict({"text": [f"{number} and {number + 1} are {2 * number + 1}. " for number in range(2000)]})
tokens = texts.map(lambda row: {"input_ids": list(row["text"].encode())}, remove_columns=["text"])


def packed(batch):
    """Rows of whole documents, with the position of each token in its own; the rest of a row is a document of zeros without labels."""
    rows = [[]]
    for document in batch["input_ids"]:
        if sum(map(len, rows[-1])) + len(document) > SEQ:
            rows.append([])
        rows[-1].append(document)
    made = {"input_ids": [], "labels": [], "positions": []}
    for documents in rows:
        ids = [token for document in documents for token in document]
        places = [place for document in documents for place in range(len(document))]
        rest = SEQ - len(ids)
        made["input_ids"].append(ids + [0] * rest)
        made["labels"].append(ids + [-100] * rest)
        made["positions"].append(places + list(range(rest)))
    return made


rows = tokens.map(packed, batched=True, remove_columns=tokens.column_names).shuffle(seed=1)
steps = len(rows) // ROWS
with trainer.Trainer(config="tiny", seq=SEQ, micro_batch=ROWS, accum=1, packing="first-fit", attention="flash", lr=3e-3, steps=steps,
                     warmup=4) as model:
    for batch in rows.with_format("numpy").iter(ROWS, drop_last_batch=True):
        record = model.step(*(np.asarray(batch[name]) for name in ["input_ids", "labels", "positions"]))
        if record["step"] % 20 == 0 or record["step"] == steps:
            print(f"step {record['step']} loss {record['loss']:.4f}")
    model.save(sys.argv[1])
