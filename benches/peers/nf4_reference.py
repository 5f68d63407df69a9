"""Writes `nf4.json`: what bitsandbytes makes of matrices in 4 bits, on the CPU.

    LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON nf4_reference.py OUT

Values follow from the place of an element, so the file has only what came out of them: codes and the codes of `absmax` as
hexadecimal digits, floats as bits. It needs no network.
"""

import json
import sys
from pathlib import Path

import bitsandbytes
import numpy as np
import torch
from bitsandbytes import functional

# Two blocks of `absmax`, and a rest.
ELEMENTS = 257 * 64 + 32


def quantise(values):
    return functional.quantize_4bit(values, blocksize=64, compress_statistics=True, quant_type="nf4")


def digits(tensor):
    return bytes(tensor.flatten().to(torch.uint8).numpy()).hex()


def bits(tensor):
    return tensor.flatten().to(torch.float32).view(torch.int32).numpy().view(np.uint32).tolist()


def matrix():
    """Exact in f32: 24 bits by a multiplicative hash, times a power of two or three by block."""
    at = np.arange(ELEMENTS, dtype=np.uint64)
    hashed = ((at * np.uint64(2654435761)) % np.uint64(1 << 32)) >> np.uint64(8)
    centred = (hashed.astype(np.int64) - (1 << 23)).astype(np.float32) * np.float32(2.0**-23)
    return torch.from_numpy(centred * (1 + (at // 64) % 7).astype(np.float32))


def all_bf16():
    """All finite bf16 in the order of their bits: 510 blocks of either sign."""
    patterns = np.concatenate([np.arange(0x7F80), np.arange(0x8000, 0xFF80)]).astype(np.uint16)
    return torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16)


def main():
    values = matrix()
    codes, state = quantise(values)
    dequantised = functional.dequantize_4bit(codes, state)
    every_bf16, _ = functional.quantize_4bit(all_bf16(), blocksize=64, compress_statistics=False, quant_type="nf4")
    written = {
        "meta": {"bitsandbytes": bitsandbytes.__version__, "torch": torch.__version__},
        "codes": digits(codes),
        "absmax_codes": digits(state.absmax),
        "absmax": bits(state.state2.absmax),
        "offset": bits(state.offset),
        # Of every 37th element.
        "dequantised": bits(dequantised.flatten()[::37]),
        "bf16_codes": digits(every_bf16),
    }
    out = Path(sys.argv[1]) / "nf4.json"
    out.write_text(json.dumps(written) + "\n")


main()
