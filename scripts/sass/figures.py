"""The figures counted for a kernel, and in which direction each gets worse."""
import dataclasses
from fractions import Fraction

from .busiest import Kernel

# Of a multiprocessor: registers, bytes of shared memory, of which a block takes a KiB for the system, warps and blocks.
REGISTERS, WARPS_MAX, BLOCKS_MAX, SYSTEM_BYTES = 64 << 10, 64, 32, 1 << 10
SHARED_BYTES = {80: 164 << 10, 90: 228 << 10}


@dataclasses.dataclass(frozen=True)
class Pass:
    """Of the busiest way through a loop, or through a kernel that has none."""
    instructions: int
    # Loops within, of which one iteration is counted: what is unrolled has none.
    loops: int
    # Products of 16 x 8 x 16; instructions of four warps are several.
    hmma: int
    # Fences and waits of such instructions, of which serialised code has two each.
    product_waits: int
    ldsm: int
    ldgsts: int
    lds: int
    # Wide loads from global memory, and the most of them that are under way at a time.
    loads: int
    in_flight: int


@dataclasses.dataclass(frozen=True)
class Figures:
    registers: int
    # Instructions that access local memory, where what does not fit in registers goes, or what is indexed.
    local: int
    # That a multiprocessor holds at a time.
    warps: int
    # On the busiest way through all of the kernel, once through every loop.
    instructions: int
    passes: tuple[Pass, ...]


def is_wide_load(instruction):
    return instruction.name == "LDG" and instruction.access_bytes() >= 8


def most_in_flight(instructions):
    """The most wide loads that have been asked for before the first of them is used."""
    most, waiting = 0, []
    for instruction in instructions:
        named = instruction.registers()
        used = [index for index, registers in enumerate(waiting) if registers & named]
        # Loads complete in order, so a wait for one also waits for those before it.
        waiting = waiting[used[-1] + 1:] if used else waiting
        if is_wide_load(instruction):
            waiting.append(instruction.loaded_registers())
        most = max(most, len(waiting))
    return most


def pass_of(way):
    # The compiler puts loads that are never made before some copies to shared memory: instructions, but no loads.
    names = [instruction.name for instruction in way.instructions if instruction.predicate != "@!PT"]
    return Pass(len(way.instructions), way.loops, way.products, names.count("WARPGROUP"), names.count("LDSM"), names.count("LDGSTS"), names.count("LDS"),
                sum(map(is_wide_load, way.instructions)), most_in_flight(way.instructions))


def passes_of(kernel, launch):
    """Passes over tensors: the loops with products of tensor cores, or else with wide loads, or else all there is. Where some warps copy
    for others, their loops too."""
    if launch.goes_over_tiles:
        loops = [kernel.busiest(loop) for outer in kernel.outermost() for loop in kernel.within(outer)]
        return tuple(pass_of(way) for way in loops if way.products or way.bytes)
    ways = [] if launch.is_without_loops else [kernel.busiest(loop) for loop in kernel.outermost()]
    loops = [way for way in ways if way.products] or [way for way in ways if any(map(is_wide_load, way.instructions))]
    return tuple(map(pass_of, loops or [kernel.busiest(kernel.whole())]))


def main_pass(figures):
    """The pass with the most work, and of those the one with the fewest instructions."""
    return max(figures.passes, key=lambda each: (each.hmma, each.loads, -each.instructions))


def warps_of(target, registers, threads, shared_bytes):
    """Warps that a multiprocessor holds at a time, in whole blocks."""
    warps = threads // 32
    # Registers are handed to warps by 256, shared memory to blocks by 128 bytes.
    of_warp, of_block = -(-registers * 32 // 256) * 256, -(-shared_bytes // 128) * 128 + SYSTEM_BYTES
    return warps * min(REGISTERS // of_warp // warps, WARPS_MAX // warps, SHARED_BYTES[target] // of_block, BLOCKS_MAX)


def figures_of(target, instructions, resources, launch):
    """Of a kernel as it is launched."""
    names = [instruction.name for instruction in instructions]
    warps = warps_of(target, resources.registers, launch.threads, resources.shared_bytes + launch.shared_bytes)
    kernel = Kernel(instructions)
    return Figures(resources.registers, names.count("LDL") + names.count("STL"), warps,
                   len(kernel.busiest(kernel.whole()).instructions), passes_of(kernel, launch))


def per(count, of):
    """A count for each product of tensor cores, or as it is where there are none."""
    return Fraction(count, of) if of else Fraction(count)


def compared(figures):
    """Figures by name, so that more is worse."""
    found = {"registers": figures.registers, "accesses of local memory": figures.local,
             "warps on a multiprocessor": -figures.warps, "instructions in all": figures.instructions}
    for number, each in enumerate(figures.passes, 1):
        loop = f" of loop {number}" if len(figures.passes) > 1 else " of the loop"
        ratio = " per HMMA" if each.hmma else ""
        found |= {f"instructions{ratio}{loop}": per(each.instructions, each.hmma),
                  f"inner loops{loop}": each.loops,
                  f"fences and waits of products{loop}": each.product_waits,
                  f"LDSM{ratio}{loop}": per(each.ldsm, each.hmma),
                  f"LDGSTS{loop}": -each.ldgsts,
                  f"loads of shared memory{loop}": per(each.lds, each.hmma),
                  f"wide loads in flight{loop}": -each.in_flight}
    return found
