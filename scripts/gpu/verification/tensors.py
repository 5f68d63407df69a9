"""safetensors files and token files, in the standard library alone."""
import array
import json
import pathlib
import random
import struct
import sys


def read_safetensors(path):
    """Tensors by name, as arrays of floats; bf16 is widened."""
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    body = memoryview(data)[8 + length:]
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: floats(body[slice(*entry["data_offsets"])], entry["dtype"]) for name, entry in entries.items()}


def floats(bytes_, dtype):
    assert sys.byteorder == "little" and dtype in ("F32", "BF16"), dtype
    values = array.array("f")
    if dtype == "F32":
        values.frombytes(bytes_)
        return values
    halves = array.array("H")
    halves.frombytes(bytes_)
    words = array.array("I", (half << 16 for half in halves))
    assert words.itemsize == 4
    values.frombytes(words.tobytes())
    return values


def write_batches(path, input_ids, targets, seq):
    """A batch file: rows of `seq` tokens and their targets."""
    rows = len(input_ids) // seq
    size = 4 * rows * seq
    entry = {"dtype": "I32", "shape": [rows, seq]}
    header = json.dumps({"input_ids": {**entry, "data_offsets": [0, size]}, "targets": {**entry, "data_offsets": [size, 2 * size]}})
    header = header.encode() + b" " * (-len(header) % 8)
    body = array.array("i", input_ids).tobytes() + array.array("i", targets).tobytes()
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(header)) + header + body)


def write_tokens(path, vocab, count, seed=0):
    """A token file (llm.c's layout for u32 tokens) of random tokens."""
    header = array.array("i", [20240801, 7, count] + [0] * 253)
    draw = random.Random(seed).randrange
    tokens = array.array("I", (draw(vocab) for _ in range(count)))
    pathlib.Path(path).write_bytes(header.tobytes() + tokens.tobytes())


def flatten(nested):
    """The numbers of nested lists, in order."""
    if not isinstance(nested, list):
        return [nested]
    return [number for inner in nested for number in flatten(inner)]


def largest_difference(actual, expected, relative_to_largest):
    """The largest difference between the entries of the same tensors, with the tensor's name; relative to the largest
    entry of its tensor, or absolute. Infinite where tensors or sizes are missing or a value is no number."""
    if actual.keys() != expected.keys():
        return float("inf"), f"other tensors: {sorted(actual.keys() ^ expected.keys())[:3]}"
    worst = (-1.0, "no tensor")
    for name, values in expected.items():
        if len(values) != len(actual[name]):
            return float("inf"), f"{name}: {len(actual[name])} entries for {len(values)}"
        scale = max(map(abs, values)) if relative_to_largest else 1.0
        difference = max(abs(a - b) for a, b in zip(actual[name], values)) / scale
        if not all(value == value for value in actual[name]):
            difference = float("inf")
        worst = max(worst, (difference, name))
    return worst
