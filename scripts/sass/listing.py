"""What the disassembler says of a kernel: its instructions, in order."""
import dataclasses
import json
import re
import subprocess
import tempfile

# An instruction's bytes, on every GPU since Volta.
STRIDE = 16


class NotDisassembled(Exception):
    """The disassembler did not read an image."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    address: int
    # With its suffixes: "LDG.E.128".
    opcode: str
    # Without blanks: "R16,desc[UR4][R22.64]".
    operands: str = ""
    # "@P0", "@!P0", or nothing.
    predicate: str = ""

    @property
    def name(self):
        return self.opcode.partition(".")[0]

    @property
    def suffixes(self):
        return self.opcode.split(".")[1:]

    def access_bytes(self):
        """Bytes that a thread moves by a load or store."""
        for bits in ("128", "64"):
            if bits in self.suffixes:
                return int(bits) // 8
        return 4

    def registers(self):
        """Numbers of the general registers that it names, read or written."""
        return {int(number) for number in re.findall(r"(?<![A-Z0-9_])R(\d+)", self.operands)}

    def loaded_registers(self):
        """Numbers of the registers that a load fills: from the first that it names on."""
        first = int(re.match(r"R(\d+)", self.operands)[1])
        return set(range(first, first + self.access_bytes() // 4))


def disassemble(tool, target, code):
    """Instructions of kernels by name, of one compute capability, from their machine code by name."""
    # All at once: the disassembler takes long to start, and branches are by distance, so that code may lie anywhere.
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(code.values()))
        file.flush()
        ended = subprocess.run([tool, "-json", "--binary", f"SM{target}", file.name], capture_output=True, text=True)
    if ended.returncode != 0:
        raise NotDisassembled(f"{tool} failed: {ended.stderr.strip()}")
    listing, first, found = parse(ended.stdout), 0, {}
    for name, own in code.items():
        end = first + len(own) // STRIDE
        found[name] = listing[first:end]
        first = end
    if first != len(listing):
        raise NotDisassembled(f"{tool} found {len(listing)} instructions where {first} are")
    return found


def parse(text):
    """Instructions, from the disassembler's JSON."""
    rows = [row for function in json.loads(text)[1] for row in function["sass-instructions"]]
    return [Instruction(STRIDE * index, row["opcode"], row.get("operands", ""), row.get("predicate", ""))
            for index, row in enumerate(rows)]
