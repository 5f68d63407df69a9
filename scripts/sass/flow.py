"""Control flow of a kernel: blocks of instructions, and the loops among them."""
import dataclasses

from .listing import STRIDE

# What ends a block. A BSYNC waits for the warp's other lanes and goes on behind itself; a divergent branch (BRA.DIV) is
# one like others.
ENDS = ("EXIT", "RET", "BRA", "CALL")
JUMPS = ("BRA", "CALL")
UNKNOWN = ("BRX", "JMP", "JMX", "BRXU", "JMXU")


class NotFollowed(Exception):
    """A kernel jumps in a way that is not followed here."""


@dataclasses.dataclass
class Block:
    """Instructions that are run one after the other, and the blocks that may follow, by index."""
    instructions: list
    successors: list


@dataclasses.dataclass(frozen=True)
class Loop:
    header: int
    # Blocks of the loop, those of loops within it too.
    blocks: frozenset
    # Blocks from which the header is entered again.
    latches: frozenset


def target_of(branch):
    """Where a branch leads, by address."""
    return int(branch.operands.rpartition(",")[2], 16)


def is_conditional(instruction):
    # A branch may have a second predicate among its operands.
    return bool(instruction.predicate) or (instruction.name == "BRA" and "," in instruction.operands)


def split(instructions):
    """Blocks without their successors, and the index of each by its first address."""
    starts = {instructions[0].address}
    for instruction in instructions:
        if instruction.name in UNKNOWN:
            raise NotFollowed(f"{instruction.opcode} at {instruction.address:#x}")
        if instruction.name in ENDS:
            starts.add(instruction.address + STRIDE)
        if instruction.name in JUMPS:
            starts.add(target_of(instruction))
    blocks, at = [], {}
    for instruction in instructions:
        if instruction.address in starts:
            at[instruction.address] = len(blocks)
            blocks.append(Block([], []))
        blocks[-1].instructions.append(instruction)
    return blocks, at


def come_back(blocks):
    """Indices of the blocks that lead to the end of a function."""
    found = {index for index, block in enumerate(blocks) if block.instructions[-1].name == "RET"}
    while True:
        more = {index for index, block in enumerate(blocks) if not found.isdisjoint(block.successors)} - found
        if not more:
            return found
        found |= more


def blocks_of(instructions):
    """The blocks of a kernel, in the order of addresses; the first is its entry."""
    blocks, at = split(instructions)
    calls = []
    for index, block in enumerate(blocks):
        last = block.instructions[-1]
        if last.name == "BRA":
            block.successors.append(at[target_of(last)])
        if last.name == "CALL":
            calls.append((block, at[target_of(last)]))
        if (last.name not in ("EXIT", "RET", "BRA") or is_conditional(last)) and index + 1 < len(blocks):
            block.successors.append(index + 1)
    # A call goes on behind itself, unless nothing there comes back: compilers leave loops in this way.
    functions = come_back(blocks)
    for block, target in calls:
        if target not in functions:
            is_left = is_conditional(block.instructions[-1])
            block.successors = [target, *block.successors] if is_left else [target]
    return blocks


def order_of(blocks):
    """Blocks that the entry leads to, each after those that lead to it, but for branches back."""
    order, seen, stack = [], {0}, [(0, iter(blocks[0].successors))]
    while stack:
        index, left = stack[-1]
        for successor in left:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(blocks[successor].successors)))
                break
        else:
            order.append(index)
            stack.pop()
    return order[::-1]


def dominators(blocks):
    """Of each block, those that every way to it passes, itself too."""
    order = order_of(blocks)
    predecessors = {index: [] for index in order}
    for index in order:
        for successor in blocks[index].successors:
            predecessors[successor].append(index)
    found = {index: set(order) for index in order}
    found[0] = {0}
    changed = True
    while changed:
        changed = False
        for index in order[1:]:
            new = set.intersection(*(found[before] for before in predecessors[index])) | {index}
            changed |= new != found[index]
            found[index] = new
    return found, predecessors


def loops_of(blocks):
    """The loops of a kernel, by their headers: what a branch back to a block that dominates it can reach it from."""
    dominating, predecessors = dominators(blocks)
    latches = {}
    for index in dominating:
        for successor in blocks[index].successors:
            if successor in dominating[index]:
                latches.setdefault(successor, set()).add(index)
    loops = []
    for header, ends in sorted(latches.items()):
        inside, left = {header}, list(ends)
        while left:
            index = left.pop()
            if index not in inside:
                inside.add(index)
                left += predecessors[index]
        loops.append(Loop(header, frozenset(inside), frozenset(ends)))
    return loops
