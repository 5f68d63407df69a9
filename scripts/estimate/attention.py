"""The time of flash attention, from the resources that the warps' main loops keep busy, and from blocks of unequal length."""
import dataclasses
import heapq

from sass.figures import warps_of

from . import hopper
from .clock import overlapped
from .code import TARGET, WARP, Unexpected

# Operations of an mma.sync, rows and columns of its tile, and its depth.
MMA_FLOPS, MMA_ROWS, MMA_COLUMNS, MMA_DEPTH = 2 * 16 * 8 * 16, 16, 8, 16
PER_CHUNK = 8


@dataclasses.dataclass(frozen=True)
class Pass:
    """A kernel of flash attention: some tiles stay in shared memory, others go by."""
    # For a row that stays, in an iteration of the main loop.
    products: int
    # Otherwise keys stay, and queries go by from the diagonal on.
    queries_stay: bool


# By the beginning of a kernel's name.
PASSES = {"flash_forward": Pass(2, True), "flash_backward_queries": Pass(3, True), "flash_backward_keys": Pass(4, False)}


def pass_of(kernel):
    """The pass that a kernel computes; none for other kernels."""
    return next((of for name, of in PASSES.items() if kernel.startswith(name)), None)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a launch, from its arguments."""
    seq: int
    head_dim: int
    # Number of query heads for each of which a block goes through the sequence.
    members: int

    @staticmethod
    def of(call):
        if pass_of(call.kernel).queries_stay:
            seq, _, _, head_dim, *_ = call.numbers
            return Sizes(seq, head_dim, 1)
        parts, seq, heads, kv_heads, head_dim, *_ = call.numbers
        return Sizes(seq, head_dim, -(-heads // kv_heads // parts))


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the machine code divides a pass into blocks, and what an iteration of a warp takes."""
    # Rows of a block that stay, and rows that go by in an iteration.
    rows: int
    passing: int
    warps: int
    # Blocks that fit on a multiprocessor, and for each resource by name, the clocks that a warp's iteration keeps it
    # busy.
    blocks: int
    busy: dict
    # Clocks of issue slots that a warp takes outside of the loop.
    outside: float

    def clocks(self, blocks):
        """Of a multiprocessor for a warp's iteration, among the warps of so many blocks."""
        return overlapped(list(self.busy.values()), blocks * self.warps)


def own_rows(tile):
    """Rows that a warp owns. Each load of four matrices that go by serves as many mma as the warp has blocks of 16 rows, twice; so
    more than one load for two mma, its own rows' among them, says that there is one block."""
    return MMA_ROWS * (1 if tile.ldsm * 2 > tile.hmma else 2)


def passing_rows(tile, own, products, head_dim):
    """Rows that go by in an iteration: each of a warp's products takes an mma for every 16 of its own, 8 of these and 16 columns."""
    passing, rest = divmod(tile.hmma * MMA_COLUMNS * MMA_DEPTH, products * (own // MMA_ROWS) * head_dim)
    if rest or not passing:
        raise Unexpected(f"{tile.hmma} mma in an iteration are no {products} products of heads of {head_dim}")
    return passing


def shape_of(counted, call):
    """A pass as it is launched."""
    if counted.tile is None:
        raise Unexpected(f"{call.kernel} has no loop with products")
    of, sizes, warps = pass_of(call.kernel), Sizes.of(call), call.threads // WARP
    own, rows = own_rows(counted.tile), -(-sizes.seq // call.grid[2])
    # If several warps have the same rows, each does a part of the work.
    sharing = max(own * warps // rows, 1)
    passing = passing_rows(counted.tile, own, of.products // sharing, sizes.head_dim)
    shared_bytes = counted.shared_bytes + call.shared_bytes
    blocks = warps_of(TARGET, counted.registers, call.threads, shared_bytes) // warps
    if not blocks:
        raise Unexpected(f"{call.kernel}: no multiprocessor has room for blocks with {shared_bytes} bytes of shared memory")
    tile = counted.tile.of_copies(2 * passing * (sizes.head_dim // PER_CHUNK) / call.threads)
    tile = tile.of_one_part() if sharing > 1 else tile
    busy = {"issue": tile.instructions / hopper.SCHEDULERS, "shared memory": tile.shared_bytes / hopper.SHARED_BYTES_A_CLOCK,
            "tensor cores": tile.hmma * MMA_FLOPS / (hopper.TENSOR_FLOPS_A_CLOCK * hopper.MMA_SHARE)}
    return Shape(rows, passing, warps, blocks, busy, (counted.instructions - counted.tile.instructions) / hopper.SCHEDULERS)


def longest_slot(lengths, slots):
    """When the last of so many slots is done, if each takes the next of these blocks as soon as it is free."""
    done = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(done, done[0] + length)
    return max(done)


def seconds(counted, call):
    """Of a launch with a block for each head and each block of rows that stay."""
    shape, sizes = shape_of(counted, call), Sizes.of(call)
    count, heads = call.grid[2], call.grid[0] * call.grid[1]
    queries_stay = pass_of(call.kernel).queries_stay
    seen = [min(sizes.seq, (block + 1) * shape.rows) if queries_stay else sizes.seq - block * shape.rows for block in range(count)]
    resident = min(shape.blocks, -(-count * heads // hopper.MULTIPROCESSORS))
    clocks = shape.clocks(resident)
    # The longest first, and all heads of a length one after the other, as they are launched.
    lengths = [sizes.members * -(-rows // shape.passing) * clocks + shape.outside
               for rows in sorted(seen, reverse=True) for _ in range(heads)]
    # A slot gets its share of the multiprocessor's time, and has all tiles of its warps to do.
    longest = longest_slot(lengths, resident * hopper.MULTIPROCESSORS)
    return longest * shape.warps * resident / hopper.CLOCK_HZ


def flops_forward(call):
    """Of the two products of a forward pass, below the diagonal."""
    seq, heads, _, head_dim, *_ = call.numbers
    return 2 * 2 * call.grid[0] * heads * head_dim * seq * seq / 2


def cudnn_seconds(seq, flops):
    """Forward and backward by cuDNN, of a forward pass of so many operations: five products backward, as it counts them."""
    forward, backward = hopper.CUDNN_FLOPS[seq]
    return flops / forward, 2.5 * flops / backward
