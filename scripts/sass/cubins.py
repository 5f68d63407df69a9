"""Machine code of kernels where it lies: in .cubin files, and as whole ELF images in any other file, such as the trainer, in
which they are compressed."""
import dataclasses
import math
import mmap
import pathlib
import re
import struct
import zlib

EM_CUDA = 190
MAGIC = b"\x7fELF"
SHT_NOBITS = 8
# Attributes in sections `.nv.info`, as cuobjdump -elf names them: EIATTR_REGCOUNT, EIATTR_MAX_THREADS and
# EIATTR_CUDA_API_VERSION.
REGISTERS, THREADS_MAX, API_VERSION = 0x2F, 0x05, 0x37


class NotUnderstood(Exception):
    """An image is not laid out as this reader knows."""


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor, whatever it is launched with."""
    registers: int
    # What __launch_bounds__ promised; none if nothing.
    threads_max: int | None
    # Declared with SHARED; a block of Hopper and later has a KiB more.
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    resources: Resources
    # Its instructions, and behind them those of functions that are its own.
    code: bytes


@dataclasses.dataclass(frozen=True)
class Cubin:
    # Compute capability without the point: 90.
    target: int
    # Of the compiler: "12.9".
    compiler: str
    # By name.
    kernels: dict[str, Kernel]


@dataclasses.dataclass(frozen=True)
class Section:
    name: str
    kind: int
    offset: int
    size: int


def image_end(data, start):
    """Where the ELF image ends that starts here."""
    programs, sections = struct.unpack_from("<QQ", data, start + 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", data, start + 54)
    end = max(programs + program_size * program_count, sections + section_size * section_count)
    for index in range(section_count):
        kind, = struct.unpack_from("<I", data, start + sections + section_size * index + 4)
        offset, size = struct.unpack_from("<QQ", data, start + sections + section_size * index + 24)
        if kind != SHT_NOBITS:
            end = max(end, offset + size)
    return start + end


def images(data):
    """Every ELF image with machine code for a GPU."""
    start = data.find(MAGIC)
    while start >= 0:
        header = data[start:start + 64]
        is_cubin = len(header) == 64 and header[4] == 2 and struct.unpack_from("<H", header, 18)[0] == EM_CUDA
        end = image_end(data, start) if is_cubin else start + len(MAGIC)
        if is_cubin:
            yield bytes(data[start:end])
        start = data.find(MAGIC, end)


# How a stream of zlib begins, whatever the level.
ZLIB = re.compile(rb"\x78[\x01\x5e\x9c\xda]")


def decompressed(data):
    """What every stream of zlib holds that begins with an ELF image."""
    for found in ZLIB.finditer(data):
        start = found.start()
        try:
            if zlib.decompressobj().decompress(data[start:start + 512], 64).startswith(MAGIC):
                yield stream(data, start)
        except zlib.error:
            # Two bytes that look like a beginning.
            continue


def stream(data, start):
    """A whole stream of zlib."""
    unpacking, parts = zlib.decompressobj(), []
    while not unpacking.eof and start < len(data):
        parts.append(unpacking.decompress(data[start:start + (1 << 16)]))
        start += 1 << 16
    return b"".join(parts)


def text_at(table, offset):
    return table[offset:table.index(b"\0", offset)].decode()


def sections_of(image):
    start, = struct.unpack_from("<Q", image, 40)
    count, names = struct.unpack_from("<HH", image, 60)
    rows = [struct.unpack_from("<IIQQQQ", image, start + 64 * index) for index in range(count)]
    table = image[rows[names][4]:rows[names][4] + rows[names][5]]
    return [Section(text_at(table, row[0]), row[1], row[4], row[5]) for row in rows]


def attributes(image, section):
    """Pairs of attribute and value of a section `.nv.info`."""
    at, end = section.offset, section.offset + section.size
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", image, at)
        at += 4
        # Form 4 has its value beside it, of so many bytes; the others have it in these two.
        if form == 4:
            yield attribute, image[at:at + value]
            at += value
        else:
            yield attribute, struct.pack("<H", value)


def read(image):
    """A cubin, from its image."""
    try:
        return parsed(image)
    except (struct.error, ValueError, KeyError) as error:
        raise NotUnderstood(f"a GPU's ELF image of {len(image)} bytes is not laid out as expected ({error!r})") from error


def parsed(image):
    sections = {section.name: section for section in sections_of(image)}
    strings, symbols = sections[".strtab"], sections[".symtab"]
    names = {}
    for index in range(symbols.size // 24):
        name, = struct.unpack_from("<I", image, symbols.offset + 24 * index)
        names[index] = text_at(image, strings.offset + name)
    counts = [struct.unpack("<II", value) for attribute, value in attributes(image, sections[".nv.info"]) if attribute == REGISTERS]
    flags, = struct.unpack_from("<I", image, 48)
    # The layout of CUDA 13 has the capability a byte further up.
    target = flags & 0xFF if image[8] < 8 else flags >> 8 & 0xFF
    # Blocks of these GPUs have a KiB of the system's own, which the sections count.
    system_bytes = 1024 if target >= 90 else 0
    kernels, versions = {}, set()
    for symbol, registers in counts:
        own = sections.get(f".nv.info.{names[symbol]}")
        # A function that kernels call has none.
        if own is None:
            continue
        found = dict(attributes(image, own))
        threads, shared = found.get(THREADS_MAX), sections.get(f".nv.shared.{names[symbol]}")
        versions.add(struct.unpack("<I", found[API_VERSION])[0])
        resources = Resources(
            registers,
            None if threads is None else math.prod(struct.unpack("<III", threads)),
            0 if shared is None else max(0, shared.size - system_bytes))
        text = sections[f".text.{names[symbol]}"]
        kernels[names[symbol]] = Kernel(resources, image[text.offset:text.offset + text.size])
    compilers = sorted(f"{version // 10}.{version % 10}" for version in versions)
    return Cubin(target, " and ".join(compilers), kernels)


def files(paths):
    """The files that are meant: themselves, or all in a folder that end in .cubin."""
    for path in map(pathlib.Path, paths):
        yield from sorted(path.glob("**/*.cubin")) if path.is_dir() else [path]


def find(paths):
    """All cubins of files and folders, each once, however often it is there."""
    found = {}
    for path in files(paths):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found |= {image: None for image in images(data)}
            found |= {image: None for whole in decompressed(data) for image in images(whole)}
    return [read(image) for image in found]
