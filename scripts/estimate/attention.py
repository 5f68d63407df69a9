"""How long flash attention takes: tiles of warps, by what their main loops keep busy, and blocks of unequal length."""
import dataclasses
import heapq

from sass.figures import warps_of

from . import hopper
from .clock import overlapped
from .code import TARGET, WARP, Unexpected

# Operations of an mma.sync, rows and columns of its tile, and its depth.
MMA_FLOPS, MMA_ROWS, MMA_COLUMNS, MMA_DEPTH = 2 * 16 * 8 * 16, 16, 8, 16
CHUNK_BYTES, PER_CHUNK = 16, 8


@dataclasses.dataclass(frozen=True)
class Pass:
    """A kernel of flash attention: some tiles stay in shared memory, pairs of others go by."""
    kernel: str
    # Of a warp, in an iteration of its main loop.
    products: int
    # Tiles that stay, and pairs that there is room for.
    staying: int
    pairs: int
    # Else keys stay, and queries go by from the diagonal on.
    queries_stay: bool
    # Two warps have the same rows, each a part of the work.
    paired: bool = False


FORWARD = Pass("flash_forward_128_bf16", 2, 1, 1, True)
QUERIES = Pass("flash_backward_queries_128_bf16", 3, 2, 2, True)
KEYS = Pass("flash_backward_keys_128_bf16", 4, 2, 2, False)
# A warp makes probabilities and sums dv, the one beside it takes them and sums dk.
PAIRED_KEYS = dataclasses.replace(KEYS, products=2, paired=True)


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a pass is cut, as its machine code has it, and what an iteration of a warp takes."""
    # Rows of a block that stay, and rows that go by in an iteration.
    rows: int
    passing: int
    warps: int
    # Blocks that a multiprocessor has room for, and clocks of it that a warp's iteration keeps each resource busy, by name.
    blocks: int
    busy: dict
    # Clocks of issue slots for what a warp does outside of the loop.
    outside: float

    def clocks(self, blocks):
        """Of a multiprocessor for a warp's iteration, among the warps of so many blocks."""
        return overlapped(list(self.busy.values()), blocks * self.warps)


def tile_rows(tile, products, head_dim):
    """Rows that a warp owns and rows that go by in an iteration, from what the loop multiplies: each of the `products` takes an
    mma for every 16 of the one, 8 of the other and 16 columns. Each load of four matrices that go by serves as many
    mma as the warp has blocks of 16 rows, twice; so more than one load for two mma, its own rows' among them, says that there is
    one block."""
    blocks = 1 if tile.ldsm * 2 > tile.hmma else 2
    passing, rest = divmod(tile.hmma * MMA_COLUMNS * MMA_DEPTH, products * blocks * head_dim)
    if rest or not passing:
        raise Unexpected(f"{tile.hmma} mma in an iteration are no {products} products of heads of {head_dim}")
    return blocks * MMA_ROWS, passing


def shape_of(counted, of, head_dim):
    """A pass, for heads of a width."""
    if counted.tile is None or counted.threads is None:
        raise Unexpected(f"{of.kernel} has no loop with products, or no bound of threads")
    warps = counted.threads // WARP
    own, passing = tile_rows(counted.tile, of.products, head_dim)
    rows = own * warps // (2 if of.paired else 1)
    pitch = (head_dim // PER_CHUNK + 1) * CHUNK_BYTES
    shared_bytes = counted.shared_bytes + (of.staying * rows + 2 * of.pairs * passing) * pitch
    blocks = warps_of(TARGET, counted.registers, counted.threads, shared_bytes) // warps
    if not blocks:
        raise Unexpected(f"{of.kernel}: no multiprocessor has room for blocks with {shared_bytes} bytes of shared memory")
    tile = counted.tile.of_copies(2 * passing * (head_dim // PER_CHUNK) / counted.threads)
    tile = tile.of_one_part() if of.paired else tile
    busy = {"issue": tile.instructions / hopper.SCHEDULERS, "shared memory": tile.shared_bytes / hopper.SHARED_BYTES_A_CLOCK,
            "tensor cores": tile.hmma * MMA_FLOPS / (hopper.TENSOR_FLOPS_A_CLOCK * hopper.MMA_SHARE)}
    return Shape(rows, passing, warps, blocks, busy, (counted.instructions - counted.tile.instructions) / hopper.SCHEDULERS)


def longest_slot(lengths, slots):
    """When the last of so many slots is done, if each takes the next of these blocks as soon as it is free."""
    done = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(done, done[0] + length)
    return max(done)


def seconds(counted, of, head_dim, seq, heads, members=1):
    """Of a launch with a block for each head and each block of rows that stay. `members`: for how many heads a block goes through
    the sequence."""
    shape = shape_of(counted, of, head_dim)
    count = -(-seq // shape.rows)
    seen = [min(seq, (block + 1) * shape.rows) if of.queries_stay else seq - block * shape.rows for block in range(count)]
    resident = min(shape.blocks, -(-count * heads // hopper.MULTIPROCESSORS))
    clocks = shape.clocks(resident)
    # The longest first, and all heads of a length one after the other, as they are launched.
    lengths = [members * -(-rows // shape.passing) * clocks + shape.outside for rows in sorted(seen, reverse=True) for _ in range(heads)]
    # A slot has the multiprocessor for its share of the time, and all of its warps' tiles to do.
    longest = longest_slot(lengths, resident * hopper.MULTIPROCESSORS)
    return longest * shape.warps * resident / hopper.CLOCK_HZ


def cudnn_seconds(workload):
    """Forward and backward of a layer by cuDNN: five products backward, as it counts them."""
    forward, backward = hopper.CUDNN_FLOPS[workload.seq]
    return workload.attention_flops / forward, 2.5 * workload.attention_flops / backward
