"""What is counted in listings, and how it is judged; no compiler and no disassembler takes part.

  python3 -m unittest discover -s scripts/sass/tests
"""
import json
import pathlib
import struct
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from sass import budget, cubins, figures, flow, kernels, listing, table
from sass.busiest import Kernel
from sass.figures import Figures, Pass

# The disassembler's JSON for the end of a loop that NVRTC 12.9 made for sm_90, shortened.
JSON = """[{"SM":{"version":{"major":9,"minor":0}}},[{"function-name":"Unknown","start":0,"length":80,"sass-instructions":[
{"opcode":"LDG.E.128","operands":"R8,desc[UR4][R24.64+0x600]"},
{"opcode":"FMUL","operands":"R11,R11,R3.reuse"},
{"predicate":"@!P1","opcode":"BRA","operands":"0x0","other-attributes":{"control-flow":"True"}},
{"opcode":"EXIT","other-attributes":{"control-flow":"True"}},
{"opcode":"BRA","operands":"0x40","other-attributes":{"control-flow":"True"}}]}]]"""


def code(text):
    """Instructions from lines such as `@P0 BRA 0x40`, from address 0 on."""
    found = []
    for line in text.strip().splitlines():
        words = line.split()
        predicate = words.pop(0) if words[0].startswith("@") else ""
        found.append(listing.Instruction(16 * len(found), words[0], "".join(words[1:]), predicate))
    return found


def opcodes(way):
    return [instruction.opcode for instruction in way.instructions]


# A loop from 0x10 to 0x80. Where P0 holds, elements are loaded one by one, which is shorter.
LOOP = code("""
    MOV R0, R1
    @P0 BRA 0x60
    LDG.E.128 R4, [R0.64]
    LDG.E.128 R8, [R0.64+0x10]
    FADD R2, R4, R8
    BRA 0x70
    LDG.E R4, [R0.64]
    STG.E.128 [R2.64], R4
    @!P1 BRA 0x10
    EXIT
""")
# A loop from 0x10 to 0x60 with a copy within that is not unrolled, at 0x20.
NESTED = code("""
    MOV R0, R1
    LDSM.16.M88.4 R8, [R0]
    @!PT LDS RZ, [RZ]
    LDGSTS.E.BYPASS.128 [R4], [R2.64]
    @!P0 BRA 0x20
    HMMA.16816.F32.BF16 R4, R8, R10, R4
    @!P1 BRA 0x10
    @P2 EXIT
    MOV R9, R4
    EXIT
""")
# Two loops over tiles, from 0x0 and 0x40, with a loop within each: the first copies, the second multiplies.
TILES = code("""
    MOV R0, R1
    LDGSTS.E.BYPASS.128 [R4], [R2.64]
    @P1 BRA 0x10
    @P2 BRA 0x0
    MOV R0, R1
    HGMMA.64x256x16.F32.BF16 R4, R8, R10, R4
    @P1 BRA 0x50
    @P2 BRA 0x40
    EXIT
""")


class Following(unittest.TestCase):
    def test_json_of_the_disassembler_is_read(self):
        found = listing.parse(JSON)
        self.assertEqual([each.address for each in found], [0, 16, 32, 48, 64])
        self.assertEqual((found[2].predicate, found[2].opcode, found[2].operands), ("@!P1", "BRA", "0x0"))
        self.assertEqual(found[0].loaded_registers(), {8, 9, 10, 11})
        self.assertEqual(found[1].registers(), {11, 3}, "uniform registers are others")

    def test_loops_are_found_by_their_branches_back(self):
        blocks = flow.blocks_of(NESTED)
        inner, outer = sorted(flow.loops_of(blocks), key=lambda loop: len(loop.blocks))
        self.assertEqual(blocks[inner.header].instructions[0].address, 0x20)
        self.assertEqual(blocks[outer.header].instructions[0].address, 0x10)
        self.assertLess(inner.blocks, outer.blocks)

    def test_a_second_predicate_makes_a_branch_conditional(self):
        blocks = flow.blocks_of(code("BRA P2, 0x20\nFADD R0, R0, R1\nEXIT"))
        self.assertEqual(sorted(blocks[0].successors), [1, 2])

    def test_a_call_goes_on_behind_itself_unless_what_it_calls_does_not_come_back(self):
        back = "@P0 CALL.REL.NOINC 0x20\nEXIT\nFADD R0, R0, R1\nRET.REL.NODEC R2 0x0"
        self.assertEqual(flow.blocks_of(code(back))[0].successors, [1])
        gone = code("FADD R0, R0, R1\n@P0 CALL.REL.NOINC 0x30\nBRA 0x0\nMOV R1, R0\nEXIT")
        self.assertEqual(sorted(flow.blocks_of(gone)[0].successors), [1, 2])
        self.assertEqual(len(Kernel(gone).busiest(Kernel(gone).whole()).instructions), 5, "all of the loop, and the rest")

    def test_jumps_that_cannot_be_followed_are_refused(self):
        with self.assertRaises(flow.NotFollowed):
            flow.blocks_of(code("BRX R2\nEXIT"))

    def test_the_busiest_way_moves_the_most_and_is_the_shortest_that_does(self):
        kernel = Kernel(LOOP)
        [loop] = kernel.outermost()
        self.assertEqual(opcodes(kernel.busiest(loop)), ["BRA", "LDG.E.128", "LDG.E.128", "FADD", "BRA", "STG.E.128", "BRA"])
        self.assertEqual(len(kernel.busiest(kernel.whole()).instructions), 9)

    def test_a_loop_within_is_gone_through_once_and_counted(self):
        kernel = Kernel(NESTED)
        [loop] = kernel.outermost()
        way = kernel.busiest(loop)
        self.assertEqual((way.loops, way.products, way.bytes, len(way.instructions)), (1, 1, 16, 6))
        self.assertEqual(opcodes(kernel.busiest(kernel.whole()))[-1], "EXIT")

    def test_a_loop_that_is_entered_in_two_places_is_refused(self):
        twice = Kernel(code("@P0 BRA 0x30\nFADD R0, R0, R1\n@P1 EXIT\nFADD R0, R0, R2\nBRA 0x10"))
        with self.assertRaises(flow.NotFollowed):
            twice.busiest(twice.whole())


class Counting(unittest.TestCase):
    def test_a_pass_has_what_its_loop_has(self):
        [found] = figures.passes_of(Kernel(NESTED), kernels.Launch(32))
        self.assertEqual(found, Pass(instructions=6, loops=1, hmma=1, product_waits=0, ldsm=1, ldgsts=1, lds=0, loads=0, in_flight=0))

    def test_products_of_every_kind_of_tensor_core_count_by_their_size(self):
        for product, hmma in [("HMMA.16816.F32.BF16", 1), ("HGMMA.64x256x16.F32.BF16", 32), ("HGMMA.64x8x16.F32.BF16", 1),
                              ("QGMMA.64x128x32.F32.E4M3.E4M3", 32)]:
            [found] = figures.passes_of(Kernel(code(f"{product} R4, R8, R10, R4\n@!P1 BRA 0x0\nEXIT")), kernels.Launch(32))
            self.assertEqual(found.hmma, hmma, product)

    def test_serialised_products_have_more_fences_and_waits(self):
        fence, product, wait = "WARPGROUP.ARRIVE\n", "HGMMA.64x256x16.F32.BF16 R4, R8, R10, R4\n", "WARPGROUP.DEPBAR.LE gsb0, 0x0\n"
        for body, waits in [(fence + 2 * product + wait, 2), (2 * (fence + product + wait), 4)]:
            [found] = figures.passes_of(Kernel(code(f"{body}@!P1 BRA 0x0\nEXIT")), kernels.Launch(128))
            self.assertEqual((found.hmma, found.product_waits), (64, waits))

    def test_of_kernels_that_go_over_tiles_the_loops_within_are_passes(self):
        found = figures.passes_of(Kernel(TILES), kernels.Launch(384, goes_over_tiles=True))
        self.assertEqual([(each.instructions, each.hmma, each.ldgsts) for each in found], [(2, 0, 1), (2, 32, 0)])

    def test_loops_without_wide_loads_are_no_passes(self):
        [found] = figures.passes_of(Kernel(code("LDG.E R4, [R0.64]\n@!P1 BRA 0x0\nLDG.E.128 R4, [R0.64]\nEXIT")), kernels.Launch(32))
        self.assertEqual((found.instructions, found.loads), (4, 1), "so it is the kernel as a whole")

    def test_loads_are_in_flight_until_the_first_use(self):
        def most(text):
            return figures.most_in_flight(code(text))

        load = "LDG.E.128 R{}, [R0.64]\n"
        self.assertEqual(most(load.format(4) + load.format(8) + "FADD R2, R5, R9"), 2)
        self.assertEqual(most(load.format(4) + "FADD R2, R7, R7\n" + load.format(8)), 1)
        self.assertEqual(most(load.format(4) + load.format(8) + "FADD R2, R8, R8\n" + load.format(4) + load.format(8)), 2)
        self.assertEqual(most(load.format(4) + load.format(8) + "FADD R2, R4, R4\n" + load.format(12) + load.format(16)), 3)
        self.assertEqual(most("LDG.E R4, [R0.64]"), 0, "a narrow load")

    def test_accesses_of_local_memory_are_counted_wherever_they_are(self):
        resources = cubins.Resources(32, None, 0)
        found = figures.figures_of(90, code("EXIT\nSTL [R1], R2\nLDL R2, [R1]\nEXIT"), resources, kernels.Launch(256))
        self.assertEqual(found.local, 2)

    def test_warps_follow_from_registers_shared_memory_and_threads(self):
        self.assertEqual(figures.warps_of(90, 168, 128, 52_224), 12, "registers: flash attention's forward pass")
        self.assertEqual(figures.warps_of(90, 32, 256, 0), 64, "the most that there are")
        self.assertEqual(figures.warps_of(90, 33, 256, 0), 48, "a register more: by eights")
        self.assertEqual(figures.warps_of(90, 32, 128, 100 << 10), 8, "shared memory")
        self.assertEqual(figures.warps_of(80, 32, 128, 100 << 10), 4, "of which Ampere has less")
        self.assertEqual(figures.warps_of(90, 16, 32, 0), 32, "blocks")


def image(target=90, machine=190, padding=0):
    """An ELF image of no sections, as far as its end is concerned."""
    header = b"\x7fELF" + bytes([2, 1, 1, 51, 7]) + bytes(7)
    return header + struct.pack("<HHIQQQIHHHHHH", 2, machine, 129, 0, 0, 64, target, 64, 56, 0, 64, 1, 0) + bytes(64 + padding)


class Finding(unittest.TestCase):
    def test_images_for_gpus_are_found_in_other_files(self):
        one, other = image(90), image(80)
        data = image(machine=62) + b"text" + one + b"\x7fELF" + bytes(3) + other + b"\x7fEL"
        self.assertEqual(list(cubins.images(data)), [one, other])

    def test_what_is_not_laid_out_as_expected_is_refused(self):
        with self.assertRaises(cubins.NotUnderstood):
            cubins.read(image())

    def test_a_file_without_machine_code_has_none(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "binary"
            path.write_bytes(image(machine=62))
            self.assertEqual(cubins.find([path]), [])


PASS = Pass(instructions=640, loops=0, hmma=128, product_waits=0, ldsm=72, ldgsts=16, lds=0, loads=0, in_flight=0)
FIGURES = Figures(registers=168, local=0, warps=12, instructions=900, passes=(PASS,))
KEY = 90, "flash_forward_128_bf16"


def changed(**changes):
    """The budget's figures with other ones of the kernel, or of its pass."""
    of_pass = {name: value for name, value in changes.items() if hasattr(PASS, name) and name != "instructions"}
    loop = {"instructions": changes["of_loop"]} if "of_loop" in changes else {}
    of_kernel = {name: value for name, value in changes.items() if name in ("registers", "local", "warps", "instructions")}
    return Figures(**{**vars(FIGURES), **of_kernel, "passes": (Pass(**{**vars(PASS), **of_pass, **loop}),)})


def judged(now):
    return budget.changes(budget.Budget("12.9", {KEY: FIGURES}), {} if now is None else {KEY: now})


class Judging(unittest.TestCase):
    def test_a_budget_is_read_as_it_was_written(self):
        known = budget.Budget("12.9", {KEY: FIGURES, (80, "swiglu_bf16"): FIGURES})
        text = budget.written(known)
        self.assertEqual(budget.read(text), known)
        self.assertEqual(len(text.splitlines()), 2 + len(known.figures), "a line for each kernel")
        with self.assertRaises(budget.Unreadable):
            budget.read(json.dumps({"compiler": "12.9", "kernels": [{"target": 90}]}))

    def test_the_same_figures_are_no_change(self):
        self.assertEqual(judged(FIGURES), [])

    def test_every_figure_has_a_worse_side(self):
        worse = dict(registers=169, local=1, warps=8, instructions=901, of_loop=641, loops=1, ldsm=73, ldgsts=15, lds=1)
        for name, value in worse.items():
            [change] = judged(changed(**{name: value}))
            self.assertTrue(change.is_worse, change.sentence)
        better = dict(registers=167, warps=16, instructions=899, of_loop=639, ldsm=71, ldgsts=17, in_flight=1)
        for name, value in better.items():
            [change] = judged(changed(**{name: value}))
            self.assertFalse(change.is_worse, change.sentence)

    def test_a_change_names_kernel_figure_before_and_after(self):
        [change] = judged(changed(ldgsts=2))
        self.assertEqual(change.sentence, "flash_forward_128_bf16 for sm_90: LDGSTS of the loop: 16 before, 2 now")
        [change] = judged(changed(of_loop=1142))
        self.assertIn("instructions per HMMA of the loop: 5 before, 8.92 now", change.sentence)

    def test_larger_tiles_are_judged_by_product(self):
        changes = judged(changed(hmma=256, of_loop=1280, ldsm=144))
        self.assertEqual(changes, [], "twice the instructions for twice the products")

    def test_kernels_that_are_missing_new_or_of_other_loops_are_refused(self):
        two = Figures(**{**vars(FIGURES), "passes": (PASS, PASS)})
        for now, words in ((None, "in none of the files"), (two, "2 loops over tensors, 1 before")):
            [change] = judged(now)
            self.assertTrue(change.is_worse and words in change.sentence, change.sentence)
        [change] = budget.changes(budget.Budget("12.9", {}), {KEY: FIGURES})
        self.assertTrue(change.is_worse and "not in the budget" in change.sentence)

    def test_the_table_has_the_busiest_loop_of_each_kernel(self):
        short = Pass(**{**vars(PASS), "hmma": 0, "instructions": 9})
        both = Figures(**{**vars(FIGURES), "passes": (short, PASS)})
        made = table.made(budget.Budget("12.9", {KEY: both, (80, KEY[1]): FIGURES}), [KEY[1], "swiglu_bf16"])
        rows = [line for line in made.splitlines() if "flash" in line]
        self.assertEqual(rows, ["| `flash_forward_128_bf16` | 168 | 12 | 900 | 640 (5 per HMMA) | 128 | 72 (0.56 per HMMA) | 16 |  |  |"])
        self.assertEqual(table.found(f"before\n{made}\nafter"), made)
        self.assertIsNone(table.found("no markers"))


if __name__ == "__main__":
    unittest.main()
