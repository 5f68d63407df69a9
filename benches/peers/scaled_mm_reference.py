"""Writes `scaled_mm.json`: what `torch._scaled_mm` gives for codes of FP8, on the CPU.

    LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON scaled_mm_reference.py OUT

Codes and biases follow from the place of an element (`codes`, `bias`), so the file has only sizes, scales and results, as
hexadecimal digits of their bits. In `exact` products the codes are of so few magnitudes that every sum is exact in f32, in
whatever order. In the others they are all finite codes. It needs no network.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMATS = [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")]
# m, k, n.
SIZES = [(1, 16, 16), (5, 48, 32), (17, 144, 16), (5, 528, 48)]
# Magnitudes of codes: the first and how many. Those from 0 on have subnormals.
FINITE = {"e4m3": (0, 0x7F), "e5m2": (0, 0x7C)}
NARROW = [(0, 0x28), (0x40, 0x20)]
# The exponent of the steps between the smallest of these, by the first.
STEPS = {"e4m3": {0: -9, 0x40: -2}, "e5m2": {0: -16, 0x40: -1}}


def hashed(count, seed):
    """Numbers of 32 bits that look random, by their places."""
    mask = np.uint64(0xFFFFFFFF)
    bits = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 20)) * np.uint64(2654435761) & mask
    bits ^= bits >> np.uint64(15)
    bits = bits * np.uint64(2246822519) & mask
    return bits ^ bits >> np.uint64(13)


def codes(shape, seed, magnitudes):
    first, span = magnitudes
    bits = hashed(shape[0] * shape[1], seed)
    made = bits & np.uint64(0x80) | (np.uint64(first) + (bits >> np.uint64(8)) % np.uint64(span))
    return torch.from_numpy(made.astype(np.uint8).reshape(shape))


def bias(columns, seed, exponent):
    steps = (hashed(columns, seed) % np.uint64(255)).astype(np.float32) - np.float32(127)
    return torch.from_numpy(steps * np.float32(2.0**exponent))


def digits(tensor):
    as_integers = {4: (torch.int32, ">u4"), 2: (torch.int16, ">u2")}[tensor.element_size()]
    return tensor.contiguous().view(as_integers[0]).numpy().astype(as_integers[1]).tobytes().hex()


def product(seed, formats, sizes, is_exact):
    m, k, n = sizes
    magnitudes = [NARROW[seed // 3 % 2] if is_exact else FINITE[name] for name in formats]
    # Powers of two, by their exponents.
    scales = [seed % 7 - 9, 5 - seed % 5]
    a = codes((m, k), 3 * seed, magnitudes[0]).view(TYPES[formats[0]])
    b = codes((n, k), 3 * seed + 1, magnitudes[1]).view(TYPES[formats[1]])
    # Biases are as large as sums of a few terms, and in `exact` products multiples of the same unit as these.
    unit = sum(STEPS[name][first] for name, (first, _) in zip(formats, magnitudes)) + 12
    exponent = sum(scales) + (unit if is_exact else 12 if "e5m2" in formats else 5)
    added = bias(n, 3 * seed + 2, exponent) if seed % 2 == 1 else None
    factors = [torch.tensor(2.0**exponent) for exponent in scales]

    def result(dtype):
        own = None if added is None else added.to(dtype)
        return digits(torch._scaled_mm(a, b.t(), scale_a=factors[0], scale_b=factors[1], bias=own, out_dtype=dtype))

    return {
        "seed": seed,
        "exact": is_exact,
        "formats": formats,
        "sizes": sizes,
        "magnitudes": magnitudes,
        "scales": scales,
        # The exponent of the steps of biases, if there are any.
        "bias": None if added is None else exponent,
        "f32": result(torch.float32),
        "bf16": result(torch.bfloat16),
    }


def main():
    choices = [(formats, sizes, is_exact) for is_exact in (True, False) for sizes in SIZES for formats in FORMATS]
    products = [product(seed, *choice) for seed, choice in enumerate(choices)]
    lines = ",\n".join(json.dumps(product) for product in products)
    out = Path(sys.argv[1]) / "scaled_mm.json"
    out.write_text(f'{{"torch": "{torch.__version__}", "products": [\n{lines}\n]}}\n')


main()
