"""How long a kernel takes: the resources that it keeps busy, how well they overlap, and waves of blocks.

Of every resource (issue slots, shared memory, tensor cores, memory) it is counted for how long a kernel would keep it busy if
there were nothing else. The longest is what the kernel takes at the least. Of the others, warps hide what they can: with w warps
to a scheduler, 1.5 / w of the rest is taken to stay exposed. The constant is from elsewhere: by it a forward pass like
FlashAttention-2's (32 rows a warp, two warps a scheduler) comes to a third of an H100's peak, for which 35 % are published (Shah
et al. 2024). It is fitted to no row of c5abdaf, and is held fixed for what came later.
"""
import dataclasses

from sass.figures import warps_of

from . import hopper
from .code import TARGET, WARP, Unexpected


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel of our own as it is launched."""
    kernel: str
    blocks: int
    threads: int
    # Of all blocks, each operand once.
    bytes: float
    # Wide loads that the loops of a warp make; none if each loop runs once.
    loads: float | None = None
    # Beyond what the kernel declares.
    shared_bytes: int = 0


def exposed(warps):
    """The share of the other resources' time that the bottleneck does not hide, with so many warps on a multiprocessor."""
    return min(1.0, hopper.EXPOSED_WARPS * hopper.SCHEDULERS / warps)


def overlapped(busy, warps):
    """Time by the times of all resources, in their unit."""
    longest = max(busy)
    return longest + exposed(warps) * (sum(busy) - longest)


def wave_seconds(counted, launch, blocks):
    """Of so many blocks that are all resident at a time, as even as can be."""
    warps = launch.threads // WARP
    resident = -(-blocks // hopper.MULTIPROCESSORS) * warps
    busy = min(blocks, hopper.MULTIPROCESSORS) * hopper.CLOCK_HZ
    instructions = counted.instructions_for(launch.loads)
    issue = blocks * warps * instructions / (busy * hopper.SCHEDULERS)
    # As often as the instructions around it.
    traffic = counted.shared_traffic * instructions / counted.instructions
    shared = blocks * warps * traffic / (busy * hopper.SHARED_BYTES_A_CLOCK)
    # No faster than loads under way arrive.
    under_way = blocks * warps * max(counted.in_flight, 1) * WARP * 16
    rate = min(hopper.BYTES_A_SECOND, under_way / hopper.LATENCY_S)
    memory = launch.bytes * blocks / launch.blocks / rate
    return overlapped([issue, shared, memory], resident)


def kernel_seconds(counted, launch):
    """Of a launch: whole waves of blocks, and the rest in one more."""
    warps = warps_of(TARGET, counted.registers, launch.threads, counted.shared_bytes + launch.shared_bytes)
    wave = warps // (launch.threads // WARP) * hopper.MULTIPROCESSORS
    if not wave:
        raise Unexpected(f"{launch.kernel}: no multiprocessor has room for a block of {launch.threads} threads")
    whole, rest = divmod(launch.blocks, wave)
    seconds = whole * wave_seconds(counted, launch, wave) if whole else 0.0
    return seconds + (wave_seconds(counted, launch, rest) if rest else 0.0)
