"""What the listing does not tell about our own kernels: how often their loops run, and the bytes that they move beside tensors.

How a kernel uses its arguments is in kernels/*.cu: the first names here are its whole numbers, in their order.
"""
WARP, PACK, ROUND = 32, 8, 256


def ceil(value, of):
    return -(-value // of)


def loads_and_bytes(call, counted):
    """Wide loads that the loops of a warp make, none where each is gone through once, and all bytes of the call. Parts of sums
    are f32 in a workspace; a pack of f32 is two loads."""
    if not call.numbers:
        return call.loads, call.bytes
    row_packs = lambda width: ceil(width, call.threads * PACK)
    match call.kernel.split("_"):
        case ["rms", "norm", "backward", *_]:
            _, part_rows, width, *_ = call.numbers
            return counted.loads * part_rows, call.bytes + 4 * call.blocks * width
        case ["rms", "norm", *_]:
            # The row twice, and its weight.
            return 3 * row_packs(call.numbers[1]), call.bytes
        case ["bias", "backward", *_]:
            _, _, part_rows, width = call.numbers
            return ceil(part_rows, call.block[1]), call.bytes + 4 * call.grid[1] * width
        case ["add", "parts", *_]:
            parts, width, _ = call.numbers
            return 2 * ceil(parts, call.block[1]), call.bytes + 4 * parts * width
        case ["flash", "add", "parts", *_]:
            parts, elements = call.numbers
            return 2 * parts, 2 * elements * (4 * parts + 2)
        case ["flash", "row", "sums", *_]:
            _, heads, head_dim, _ = call.numbers
            return None, call.grid[0] * heads * (2 * 2 * head_dim + 4)
        case ["cross", "entropy", *_]:
            # A row is read twice, the second time from cache.
            return 2 * row_packs(call.numbers[0]), call.bytes
        case ["norm", "grains", dtype]:
            return ceil(call.numbers[0], call.blocks * call.threads * PACK) * (2 if dtype == "f32" else 1), call.bytes
        case ["norm", "and", "clip", *_]:
            return row_packs(call.numbers[0]) * PACK, call.bytes
        case ["adamw", *_]:
            return counted.loads * ceil(call.numbers[1], call.blocks * call.threads // WARP * ROUND), call.bytes
    return call.loads, call.bytes
