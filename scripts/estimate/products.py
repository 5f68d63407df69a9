"""How long the library takes for a matrix product, by its shape.

A large product is held by the card's power limit. Others are held by what a multiprocessor does at a time: tiles of the result go
in waves over the multiprocessors, whole tiles are computed at the edges, and every tile waits for its first operands and for
its result. Of several tiles, and of several parts of k where the result has few, the fastest is taken, as cuBLASLt's heuristic
should. What a result is added to is half hidden, as the planner takes it for the head's chunk.
"""
from . import hopper

# Rows and columns of a multiprocessor's tile, and the share of the rate that it reaches: a smaller tile loads more for as many
# operations. The shares are assumptions.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 256, 0.85), (64, 128, 0.75), (64, 64, 0.5))
# Parts of k whose sums are added in a second pass.
PARTS = (1, 2, 4, 8)
# Bytes of an operand's element, and of a partial sum's.
BF16, F32 = 2, 4
# The share of the bytes of what is added to that takes time beside the operations: an assumption.
EXPOSED = 0.5


def computing_seconds(m, n, k, tile, parts):
    """Of the multiprocessors, for tiles of this size and so many parts of k."""
    rows, columns, share = tile
    tiles = -(-m // rows) * -(-n // columns) * parts
    waves = -(-tiles // hopper.MULTIPROCESSORS)
    of_one = hopper.UNLIMITED_PRODUCT_FLOPS * share / hopper.MULTIPROCESSORS
    depth = -(-k // parts)
    sums = 2 * F32 * m * n * parts / hopper.BYTES_A_SECOND if parts > 1 else 0.0
    return waves * (2 * rows * columns * depth / of_one + hopper.TILE_WAIT_S) + sums


def seconds(product, bytes, tuned=1.0):
    """Of a product as it is listed, which moves so many bytes at the least. `tuned`: by how much the library is faster than assumed."""
    m, n, k = (product[size] for size in "mnk")
    m *= product.get("batch", 1)
    by_shape = min(computing_seconds(m, n, k, tile, parts) for tile in TILES for parts in PARTS)
    computing = max(2 * m * n * k / hopper.PRODUCT_FLOPS, by_shape) / tuned
    result = bytes - BF16 * (m * k + k * n) if product.get("adds") else 0
    return max(computing + EXPOSED * result / hopper.BYTES_A_SECOND, bytes / hopper.BYTES_A_SECOND)
