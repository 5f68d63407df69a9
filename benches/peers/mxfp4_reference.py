"""Widens experts in MXFP4 with transformers, for `crates/model/tests/it/hugging_face/mxfp4.rs`.

Bytes follow from their places, so the test makes the same ones. Prints the checksum of each widened tensor in bf16.
"""

import zlib

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

EXPERTS, HIDDEN, FFN = 3, 64, 32


def hashed(shape, seed):
    """Bytes by their places."""
    places = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) + seed
    return ((places * 2654435761) % 2**32 >> 24).reshape(shape)


def tensors(outputs, inputs, seed):
    """Blocks, and the exponents of their powers of two: around 1, and the least and the most in between."""
    blocks = hashed((EXPERTS, outputs, inputs // 32, 16), seed)
    scales = hashed((EXPERTS, outputs, inputs // 32), seed + 1)
    ends = torch.tensor([0, 1, 2, 252])
    scales = torch.where(scales < 64, ends[scales % 4], 120 + scales % 16)
    return blocks.to(torch.uint8), scales.to(torch.uint8)


for name, outputs, inputs, seed in [("gate_up_proj", 2 * FFN, HIDDEN, 5), ("down_proj", HIDDEN, FFN, 7)]:
    widened = convert_moe_packed_tensors(*tensors(outputs, inputs, seed))
    assert widened.isfinite().all()
    print(name, list(widened.shape), f"{zlib.crc32(widened.view(torch.uint8).numpy().tobytes()):#010x}")
