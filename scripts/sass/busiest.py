"""The path through a kernel or a loop with the most work, which a step's large, aligned tensors take.

Of all ways through, it has the most products of tensor cores, then the most bytes in copies to shared memory and in wide
loads and stores, and of those it is the one with the fewest instructions. So what is rare and done piece by piece
(edges, tensors that are not aligned, masks, dropout) is left out, as it is in almost every iteration. A loop within is
gone through once.
"""
import dataclasses
import functools
import re

from .flow import Loop, NotFollowed, blocks_of, loops_of, order_of


# The products of four warps: HGMMA.64x256x16 of bf16, QGMMA.64x256x32 of FP8.
OF_GROUP = re.compile(r"[HQ]GMMA\.64x(\d+)x(\d+)\.")


def products_of(instruction):
    """Products of 16 x 8 x 16 that it is to a warp, as HMMA.16816 is one."""
    of_group = OF_GROUP.match(instruction.opcode)
    if of_group:
        columns, depth = map(int, of_group.groups())
        return columns // 8 * depth // 16
    return int(instruction.name == "HMMA")


def work(instruction):
    """Products, and bytes of wide accesses of global memory."""
    products = products_of(instruction)
    if products:
        return products, 0
    if instruction.name in ("LDGSTS", "LDG", "STG") and instruction.access_bytes() >= 8:
        return 0, instruction.access_bytes()
    return 0, 0


@dataclasses.dataclass(frozen=True)
class Way:
    """Instructions that follow each other, and how many loops they pass through."""
    instructions: tuple = ()
    loops: int = 0
    products: int = 0
    bytes: int = 0

    @staticmethod
    def through(instructions, work):
        each = [work(instruction) for instruction in instructions]
        return Way(tuple(instructions), 0, sum(products for products, _ in each), sum(bytes for _, bytes in each))

    def then(self, other):
        return Way(self.instructions + other.instructions, self.loops + other.loops, self.products + other.products,
                   self.bytes + other.bytes)

    def rank(self):
        return self.products, self.bytes, -len(self.instructions)


class Kernel:
    """A kernel's blocks and loops. `work` says what an instruction does, if it is to be something else than in most kernels."""

    def __init__(self, instructions, work=work):
        self.work = work
        self.blocks = blocks_of(instructions)
        self.loops = loops_of(self.blocks)
        self.order = order_of(self.blocks)

    def outermost(self):
        """Loops that are in no other, by their place in the code."""
        return [loop for loop in self.loops if not any(loop.blocks < other.blocks for other in self.loops)]

    def within(self, region):
        """Loops of a region that are in no other of its loops."""
        inside = [loop for loop in self.loops if loop.blocks < region.blocks]
        return [loop for loop in inside if not any(loop.blocks < other.blocks for other in inside)]

    def whole(self):
        """All of the kernel, as if it were one iteration that ends where a thread exits."""
        ends = frozenset(index for index in self.order if self.blocks[index].instructions[-1].name == "EXIT")
        return Loop(-1, frozenset(self.order), ends)

    @functools.cache
    def busiest(self, region):
        """The busiest way through an iteration of a loop, or through `whole`."""
        # A loop within stands for its blocks: it is entered at its header, and left from any of them.
        inner = {loop.header: loop for loop in self.within(region)}
        hidden = set().union(*(loop.blocks - {header} for header, loop in inner.items()))
        # Of each block, from it to the end of the iteration; none if it does not lead there.
        onwards = {}
        for index in reversed(self.order):
            if index not in region.blocks or index in hidden:
                continue
            members = inner[index].blocks if index in inner else {index}
            after = {successor for member in members for successor in self.blocks[member].successors}
            after = (after & region.blocks) - members - {region.header}
            if after - onwards.keys():
                raise NotFollowed(f"a loop that is entered in several places, in block {index}")
            ways = [onwards[successor] for successor in sorted(after) if onwards[successor] is not None]
            ways += [Way()] if members & region.latches else []
            onwards[index] = self.step(index, inner).then(max(ways, key=Way.rank)) if ways else None
        # Of the kernel it is the first block's, whatever its header is called.
        return onwards[max(region.header, 0)]

    def step(self, index, inner):
        """The way through a block, or through the loop that it is the header of."""
        if index not in inner:
            return Way.through(self.blocks[index].instructions, self.work)
        through = self.busiest(inner[index])
        return dataclasses.replace(through, loops=through.loops + 1)
