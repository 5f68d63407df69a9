"""How long flash attention takes: tiles of warps, by what their main loops keep busy, and blocks of unequal length."""
import heapq

from sass.figures import warps_of

from . import hopper
from .clock import overlapped
from .code import TARGET, WARP, Unexpected

# Operations of an mma.sync of 16 x 8 x 16, and rows and columns of its tile.
MMA_FLOPS, MMA_ROWS, MMA_COLUMNS, MMA_DEPTH = 2 * 16 * 8 * 16, 16, 8, 16


def tile_rows(tile, products, head_dim):
    """Rows that a warp owns and rows that go by in an iteration, from what the loop multiplies: each of the `products` takes an
    mma for every 16 of the one, 8 of the other and 16 columns. Each load of four matrices that go by serves as many
    mma as the warp has blocks of 16 rows, twice; so more than one load for three mma says that there is one block."""
    blocks = 1 if tile.ldsm * 3 > tile.hmma else 2
    passing, rest = divmod(tile.hmma * MMA_COLUMNS * MMA_DEPTH, products * blocks * head_dim)
    if rest or not passing:
        raise Unexpected(f"{tile.hmma} mma in an iteration are no {products} products of heads of {head_dim}")
    return blocks * MMA_ROWS, passing


def tile_clocks(tile, warps):
    """Clocks of a multiprocessor for an iteration of one warp, among so many."""
    busy = [tile.instructions / hopper.SCHEDULERS, tile.shared_bytes / hopper.SHARED_BYTES_A_CLOCK,
            tile.hmma * MMA_FLOPS / (hopper.TENSOR_FLOPS_A_CLOCK * hopper.MMA_SHARE)]
    return overlapped(busy, warps)


def longest_slot(lengths, slots):
    """When the last of so many slots is done, if each takes the next of these blocks as soon as it is free."""
    done = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(done, done[0] + length)
    return max(done)


def blocks_resident(counted, threads, dynamic_bytes, blocks):
    """Blocks that a multiprocessor holds at a time."""
    fit = warps_of(TARGET, counted.registers, threads, counted.shared_bytes + dynamic_bytes) // (threads // WARP)
    return min(fit, -(-blocks // hopper.MULTIPROCESSORS))


def seconds(counted, threads, heads, seq, head_dim, products, members=1, queries_stay=True):
    """Of a launch with a block for each head and each block of rows that stay. `members`: how often a block goes through the
    sequence, for as many heads. `queries_stay`: keys go by up to the diagonal; else queries from it on."""
    warps = threads // WARP
    own, passing = tile_rows(counted.tile, products, head_dim)
    rows = own * warps
    # Tiles in shared memory: rows that stay (queries, and dout beside them; or keys and values), and those that go by.
    chunks, staying, going = head_dim // 8 + 1, 1 if products == 2 else 2, 2 if products == 2 else 4
    dynamic_bytes = (staying * rows + going * passing) * chunks * 16
    blocks = -(-seq // rows)
    resident = blocks_resident(counted, threads, dynamic_bytes, blocks * heads)
    if resident < 1:
        raise Unexpected(f"blocks of {threads} threads with {dynamic_bytes} bytes of shared memory do not fit")
    copies = 2 * passing * (head_dim // 8) / threads
    clocks = tile_clocks(counted.tile.of_copies(copies), resident * warps)
    # Outside of the loop; the loads there are waited for while other blocks work.
    outside = (counted.instructions - counted.tile.instructions) / hopper.SCHEDULERS
    tiles = [-(-min(seq, (block + 1) * rows) // passing) if queries_stay else -(-(seq - block * rows) // passing)
             for block in range(blocks)]
    # The longest first, and all heads of a length one after the other, as they are launched.
    lengths = [members * tile * clocks + outside for tile in sorted(tiles, reverse=True) for _ in range(heads)]
    # A slot has the multiprocessor for its share of the time, and all of its warps' tiles to do.
    slots = resident * hopper.MULTIPROCESSORS
    return longest_slot(lengths, slots) * warps * resident / hopper.CLOCK_HZ


def cudnn_seconds(workload):
    """Forward and backward of a layer by cuDNN: five products backward, as it counts them."""
    forward, backward = hopper.CUDNN_FLOPS[workload.seq]
    return workload.attention_flops / forward, 2.5 * workload.attention_flops / backward
