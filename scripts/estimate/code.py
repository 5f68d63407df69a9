"""Machine code of a tree's kernels for sm_90, and the instructions that one warp of each runs."""
import dataclasses
import hashlib
import io
import os
import pathlib
import subprocess
import tarfile
import tempfile

from sass import cubins, figures, listing, nvrtc, packages
from sass.busiest import Kernel as Flow, work

TARGET = 90
WARP = 32


class NoTree(Exception):
    """A commit is not there."""


class Unexpected(Exception):
    """A tree's machine code does not have the form expected here."""


class Kernels(dict):
    """Counts by a kernel's name."""

    def __missing__(self, name):
        raise Unexpected(f"there is no kernel {name} in the sources: the listing is of another time")


@dataclasses.dataclass(frozen=True)
class Tile:
    """A loop with products of tensor cores: counts of a warp's iteration, each inner loop counted once."""
    instructions: int
    hmma: int
    ldsm: int
    # Bytes that it moves through shared memory: matrices loaded, chunks copied in, other loads and stores.
    shared_bytes: int
    # Copies of 16 bytes a lane, and instructions and bytes of the loops within that make them, where they are not unrolled.
    copies: int
    copy_instructions: int = 0
    copy_bytes: int = 0
    # The instructions that this path has beyond the shortest path with as many products. If warps have different parts,
    # these are all the parts.
    of_parts: int = 0
    bytes_of_parts: int = 0

    def of_copies(self, copies):
        """An iteration that makes so many copies, whether by a loop or unrolled."""
        again = copies / self.copies - 1 if self.copy_instructions else 0
        return dataclasses.replace(self, instructions=self.instructions + again * self.copy_instructions,
                                   shared_bytes=self.shared_bytes + again * self.copy_bytes)

    def of_one_part(self):
        """The average over two warps that have different parts; the path counts both parts."""
        return dataclasses.replace(self, instructions=self.instructions - self.of_parts / 2,
                                   shared_bytes=self.shared_bytes - self.bytes_of_parts / 2)


@dataclasses.dataclass(frozen=True)
class Counted:
    """A kernel."""
    registers: int
    # Of a block, where the kernel promises it.
    threads: int | None
    shared_bytes: int
    # Instructions of a warp on the busiest path, once through every loop; and those in its loops over tensors.
    instructions: int
    looped: int
    # Wide loads of these loops, and the most under way at a time.
    loads: int
    in_flight: int
    # Bytes that a warp moves through shared memory on that way, without conflicts of banks.
    shared_traffic: int
    # Of the loop with products, if there is one.
    tile: Tile | None = None

    def instructions_for(self, loads):
        """Of a warp whose loops make so many wide loads; none: each loop once."""
        if not loads or not self.loads:
            return self.instructions
        return self.instructions - self.looped + self.looped * loads / self.loads


def extracted(commit, root, folder):
    """The kernels of a commit, in a folder within this one."""
    packed = subprocess.run(["git", "-C", str(root), "archive", commit, "kernels"], capture_output=True)
    if packed.returncode != 0:
        raise NoTree(f"git knows no {commit} with kernels: {packed.stderr.decode().strip()}; hint: a shallow clone lacks old "
                     "commits, git fetch --unshallow brings them")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return pathlib.Path(folder) / "kernels"


def cached_cubin(source, cache):
    """The cubin of a source, compiled once for each content of it and of the folder's headers."""
    texts = [source.read_bytes(), *(header.read_bytes() for header in sorted(source.parent.glob("*.cuh")))]
    key = hashlib.sha256(repr((packages.COMPILER, TARGET, texts)).encode()).hexdigest()[:32]
    path = cache / f"{source.stem}-{key}.cubin"
    if not path.exists():
        compiled = nvrtc.compile(source, TARGET)
        cache.mkdir(parents=True, exist_ok=True)
        # Another process that compiles it at the same time writes the same file.
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as partial:
            partial.write(compiled)
        os.replace(partial.name, path)
    return cubins.read(path.read_bytes())


def kernels_of(folder, sources):
    """Counts by the kernel's name, of kernels with their sources."""
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    found = {}
    for source in sorted(set(sources.values())):
        cubin = cached_cubin(folder / f"{source}.cu", home / "trainer" / "cubins")
        found |= {name: kernel for name, kernel in cubin.kernels.items() if sources.get(name) == source}
    listings = listing.disassemble(packages.disassembler(), TARGET, {name: kernel.code for name, kernel in found.items()})
    return Kernels((name, counted(listings[name], kernel.resources)) for name, kernel in found.items())


def shared_bytes_of(instructions):
    """Bytes that a warp's instructions move through shared memory."""
    total = 0
    for instruction in instructions:
        if instruction.predicate == "@!PT":
            continue
        if instruction.name == "LDSM":
            matrices = int(instruction.suffixes[-1]) if instruction.suffixes[-1] in ("2", "4") else 1
            total += matrices * 8 * 16
        elif instruction.name in ("LDS", "STS", "LDGSTS"):
            total += WARP * instruction.access_bytes()
    return total


def count(instructions, name):
    return sum(instruction.name == name and instruction.predicate != "@!PT" for instruction in instructions)


def with_exponentials(instruction):
    """Decides among paths through a loop with as many products and copies: by exponentials (a path on which queries see no
    keys has none), and by numbers that other warps hand over in shared memory."""
    if instruction.opcode == "MUFU.EX2":
        return 0, 1 << 20
    if instruction.name == "LDS" and instruction.access_bytes() == 16:
        return 0, 16
    return work(instruction)


def tile_of(instructions):
    """Of the loop with the most products; none if there is no such loop."""
    short, full = Flow(instructions), Flow(instructions, with_exponentials)
    loops = [loop for loop in short.outermost() if short.busiest(loop).products]
    if not loops:
        return None
    loop = max(loops, key=lambda each: short.busiest(each).products)
    way, shortest = full.busiest(loop).instructions, short.busiest(loop).instructions
    inner = [full.busiest(each).instructions for each in full.within(loop)]
    copying = [instruction for each in inner if count(each, "LDGSTS") for instruction in each]
    return Tile(len(way), count(way, "HMMA"), count(way, "LDSM"), shared_bytes_of(way), count(way, "LDGSTS"), len(copying),
                shared_bytes_of(copying), len(way) - len(shortest), shared_bytes_of(way) - shared_bytes_of(shortest))


def counted(instructions, resources):
    """Figures of a kernel."""
    flow = Flow(instructions)
    whole = flow.busiest(flow.whole()).instructions
    loops = [flow.busiest(loop).instructions for loop in flow.outermost()]
    # Only loops for large, aligned tensors: the path through the kernel does not reach the others.
    taken = {instruction.address for instruction in whole}
    loops = [way for way in loops if any(map(figures.is_wide_load, way)) and all(each.address in taken for each in way)]
    passes = figures.passes_of(flow)
    return Counted(resources.registers, resources.threads_max, resources.shared_bytes, len(whole), sum(map(len, loops)),
                   sum(figures.is_wide_load(instruction) for way in loops for instruction in way),
                   max(each.in_flight for each in passes), shared_bytes_of(whole), tile_of(instructions))
