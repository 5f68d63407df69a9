"""The arithmetic of the estimate, on cases that can be done by hand; no compiler and no disassembler takes part.

  python3 -m unittest discover -s scripts/estimate/tests
"""
import dataclasses
import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

from estimate import attention, clock, code, hopper, launches, step, tables, trees, workloads
from estimate.code import Counted, Tile
from sass import listing
from sass.cubins import Resources

# A kernel of which a warp makes 8 wide loads a loop of 100 instructions, with as many registers as 64 warps may have.
STREAM = Counted(registers=32, threads=None, shared_bytes=0, instructions=130, looped=100, loads=8, in_flight=8, shared_traffic=0)


def instructions(text):
    """From lines such as `@P0 BRA 0x40`, from address 0 on."""
    found = []
    for line in text.strip().splitlines():
        words = line.split()
        predicate = words.pop(0) if words[0].startswith("@") else ""
        found.append(listing.Instruction(16 * len(found), words[0], "".join(words[1:]), predicate))
    return found


# Tiles go by from 0x10 to 0x80; the loop within, from 0x20 to 0x40, copies them.
TILES = instructions("""
    MOV R0, R1
    MOV R2, R3
    @!PT LDS RZ, [RZ]
    LDGSTS.E.BYPASS.128 [R4], [R2.64]
    @P1 BRA 0x20
    LDSM.16.M88.4 R8, [R0]
    HMMA.16816.F32.BF16 R4, R8, R12, R4
    HMMA.16816.F32.BF16 R4, R8, R12, R4
    @P0 BRA 0x10
    EXIT
""")


class Counting(unittest.TestCase):
    def test_copies_count_as_often_as_they_are_made(self):
        tile = code.tile_of(TILES)
        self.assertEqual((tile.instructions, tile.hmma, tile.ldsm, tile.copies, tile.copy_instructions), (8, 2, 1, 1, 3))
        self.assertEqual(tile.shared_bytes, 512 + 512)
        # Three more copies of three instructions.
        self.assertEqual((tile.of_copies(4).instructions, tile.of_copies(4).shared_bytes), (8 + 9, 1024 + 3 * 512))
        unrolled = dataclasses.replace(tile, copy_instructions=0, copy_bytes=0)
        self.assertEqual(unrolled.of_copies(4), unrolled)

    def test_exponentials_are_not_passed_by(self):
        # From 0x10 to 0x50: where P0 holds, no key is seen, and nothing is done.
        tile = code.tile_of(instructions("""
            MOV R0, R1
            HMMA.16816.F32.BF16 R4, R8, R12, R4
            @P0 BRA 0x50
            FMUL R4, R4, R5
            MUFU.EX2 R3, R4
            @P1 BRA 0x10
            EXIT
        """))
        self.assertEqual((tile.instructions, tile.hmma, tile.of_parts), (5, 1, 2))

    def test_two_warps_of_different_parts_share_them(self):
        # From 0x10 to 0x80: one part makes an exponential and hands it over, the other takes it.
        tile = code.tile_of(instructions("""
            MOV R0, R1
            HMMA.16816.F32.BF16 R4, R8, R12, R4
            @P0 BRA 0x50
            MUFU.EX2 R3, R4
            STS.128 [R1], R4
            @!P0 BRA 0x80
            LDS.128 R4, [R1]
            FMUL R4, R4, R5
            @P1 BRA 0x10
            EXIT
        """))
        self.assertEqual((tile.instructions, tile.shared_bytes), (8, 1024))
        # Four instructions that both have, and four of parts.
        self.assertEqual((tile.of_one_part().instructions, tile.of_one_part().shared_bytes), (6, 512))

    def test_bytes_in_shared_memory_are_those_of_a_warp(self):
        moved = instructions("LDSM.16.M88.2 R0, [R4]\nLDS R0, [R4]\nSTS.128 [R4], R0\n@!PT LDS RZ, [RZ]\nLDG.E.128 R0, [R2.64]")
        self.assertEqual(code.shared_bytes_of(moved), 256 + 128 + 512)

    def test_loops_are_gone_through_as_often_as_their_loads_ask_for(self):
        self.assertEqual(STREAM.instructions_for(None), 130)
        self.assertEqual(STREAM.instructions_for(24), 30 + 300)

    def test_loops_of_other_tensors_do_not_count(self):
        # Two loops, of which one is gone through: from 0x10 with two loads, or from 0x50 with one.
        counted = code.counted(instructions("""
            @P0 BRA 0x50
            LDG.E.128 R4, [R0.64]
            LDG.E.128 R8, [R2.64]
            @P1 BRA 0x10
            EXIT
            LDG.E.128 R4, [R0.64]
            FADD R4, R4, R4
            @P1 BRA 0x50
            EXIT
        """), Resources(24, None, 0))
        self.assertEqual((counted.instructions, counted.looped, counted.loads), (5, 3, 2))

    def test_a_kernel_without_products_has_no_tile(self):
        counted = code.counted(instructions("LDG.E.128 R4, [R0.64]\nFADD R2, R4, R4\nEXIT"), Resources(24, None, 0))
        self.assertEqual((counted.instructions, counted.in_flight, counted.tile), (3, 1, None))

    def test_a_kernel_that_is_not_there_is_a_sentence(self):
        with self.assertRaisesRegex(code.Unexpected, "no kernel swiglu_bf16"):
            code.Kernels()["swiglu_bf16"]

    def test_an_unknown_commit_is_a_sentence(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(code.NoTree, "git knows no 0000000"):
            code.extracted("0000000", ROOT, folder)


class Timing(unittest.TestCase):
    def test_what_is_not_the_bottleneck_hides_behind_other_warps(self):
        self.assertEqual([clock.exposed(warps) for warps in (4, 8, 12, 64)], [1.0, 0.75, 0.5, 1.5 / 16])
        self.assertEqual(clock.overlapped([3.0, 2.0, 1.0], 12), 4.5)

    def test_a_product_takes_its_operations_or_its_bytes(self):
        square = clock.product(8192, 8192, 8192)
        self.assertEqual((square.flops, square.bytes), (2 * 8192**3, 6 * 8192**2))
        self.assertAlmostEqual(clock.product_seconds(square), 2 * 8192**3 / 700e12)
        self.assertAlmostEqual(clock.product_seconds(square, 1.25), 2 * 8192**3 / 875e12)
        # A gradient of f32 that is added to: a chunk's sum is too short to hide it.
        narrow = clock.product(8192, 8192, 256, 4, added=True)
        self.assertAlmostEqual(clock.product_seconds(narrow), (4 * 8192 * 256 + 8 * 8192**2) / 3e12)

    def test_one_block_is_bound_by_latency_and_a_full_wave_by_bandwidth(self):
        lone = clock.Launch("x", 1, 256, 8 * 8 * 512)
        issue = 8 * 130 / 4 / hopper.CLOCK_HZ
        # Eight warps: three quarters of the rest are exposed. All that they load is under way at once.
        self.assertAlmostEqual(clock.kernel_seconds(STREAM, lone), hopper.LATENCY_S + 0.75 * issue)
        blocks = 8 * 132
        wide = clock.Launch("x", blocks, 256, 3e12)
        expected = 1.0 + 64 * 130 / 4 / hopper.CLOCK_HZ * 1.5 / 16
        self.assertAlmostEqual(clock.kernel_seconds(STREAM, wide), expected)

    def test_shared_memory_is_as_busy_as_loops_are_long(self):
        counted = dataclasses.replace(STREAM, shared_traffic=1300)
        plain, busy = (clock.kernel_seconds(each, clock.Launch("x", 8 * 132, 256, 0, 24)) for each in (STREAM, counted))
        # 330 instructions in place of 130, of 64 warps; a share of what is the lesser.
        clocks = 64 * 1300 * 330 / 130 / 128
        self.assertAlmostEqual(busy - plain, clocks * 1.5 / 16 / hopper.CLOCK_HZ)

    def test_a_block_that_fits_nowhere_is_a_sentence(self):
        with self.assertRaisesRegex(code.Unexpected, "x: no multiprocessor"):
            clock.kernel_seconds(dataclasses.replace(STREAM, shared_bytes=300_000), clock.Launch("x", 1, 256, 0))

    def test_what_is_left_of_a_wave_takes_as_long_as_its_own(self):
        one, two = (clock.kernel_seconds(STREAM, clock.Launch("x", blocks, 256, 0)) for blocks in (8 * 132, 16 * 132))
        more = clock.kernel_seconds(STREAM, clock.Launch("x", 8 * 132 + 1, 256, 0))
        self.assertAlmostEqual(two, 2 * one)
        self.assertAlmostEqual(more, one + 8 * 130 / 4 / hopper.CLOCK_HZ)


class Attention(unittest.TestCase):
    TILE = Tile(instructions=640, hmma=128, ldsm=72, shared_bytes=72 * 512, copies=16)
    COUNTED = Counted(168, 128, 0, 1040, 0, 0, 0, 0, TILE)

    def test_rows_follow_from_the_products(self):
        self.assertEqual(attention.tile_rows(self.TILE, 2, 128), (16, 64))
        shared = dataclasses.replace(self.TILE, hmma=256, ldsm=80)
        self.assertEqual(attention.tile_rows(shared, 2, 128), (32, 64))
        with self.assertRaisesRegex(code.Unexpected, "128 mma"):
            attention.tile_rows(self.TILE, 3, 128)

    def test_a_tile_takes_what_is_busiest_and_half_of_the_rest(self):
        shape = attention.shape_of(self.COUNTED, attention.FORWARD, 128)
        self.assertEqual((shape.rows, shape.passing, shape.warps, shape.blocks), (64, 64, 4, 3))
        issue, shared, tensor = 160, 288, 128 * 4096 / (4096 * 0.62)
        self.assertEqual(shape.busy, {"issue": issue, "shared memory": shared, "tensor cores": tensor})
        self.assertAlmostEqual(shape.clocks(3), shared + (issue + tensor) / 2)
        self.assertEqual(shape.outside, 100)

    def test_paired_warps_have_half_of_the_rows_and_of_the_parts(self):
        tile = dataclasses.replace(self.TILE, hmma=128, ldsm=40, of_parts=80, bytes_of_parts=1024)
        counted = dataclasses.replace(self.COUNTED, tile=tile)
        shape = attention.shape_of(counted, attention.PAIRED_KEYS, 128)
        # Two products of 32 rows by 32; four warps have 64 rows.
        self.assertEqual((shape.rows, shape.passing), (64, 32))
        self.assertEqual((shape.busy["issue"], shape.busy["shared memory"]), (150, 72 * 4 - 4))

    def test_blocks_are_taken_in_their_order(self):
        self.assertEqual(attention.longest_slot([4, 3, 2, 1], 2), 5)
        self.assertEqual(attention.longest_slot([1, 2, 3, 4], 2), 6)
        self.assertEqual(attention.longest_slot([7], 2), 7)

    def test_a_block_alone_takes_its_tiles_and_what_is_around_them(self):
        seconds = attention.seconds(self.COUNTED, attention.FORWARD, 128, 64, 1)
        clocks = 288 + 160 + 128 / 0.62  # One warp a scheduler: all of it.
        self.assertAlmostEqual(seconds, 4 * (clocks + 100) / hopper.CLOCK_HZ)
        # Two blocks of rows on two multiprocessors: the longer has two tiles.
        longer = attention.seconds(self.COUNTED, attention.FORWARD, 128, 128, 1)
        self.assertAlmostEqual(longer - seconds, 4 * clocks / hopper.CLOCK_HZ)

    def test_keys_are_seen_by_the_queries_behind_them(self):
        by_keys = dataclasses.replace(attention.FORWARD, queries_stay=False)
        forward, backward = (attention.seconds(self.COUNTED, of, 128, 1024, 132) for of in (attention.FORWARD, by_keys))
        self.assertAlmostEqual(forward, backward)
        self.assertGreater(attention.seconds(self.COUNTED, by_keys, 128, 1024, 132, 2), 1.9 * backward)

    def test_what_does_not_fit_or_multiplies_nothing_is_refused(self):
        for change, said in ((dict(tile=None), "no loop with products"), (dict(shared_bytes=300_000), "has room")):
            with self.assertRaisesRegex(code.Unexpected, said):
                attention.shape_of(dataclasses.replace(self.COUNTED, **change), attention.FORWARD, 128)


class Workloads(unittest.TestCase):
    def test_the_close_readings_percentages_are_of_causal_operations(self):
        known = workloads.all_workloads()
        for name, (_, ms, share) in tables.CLOSE_READING.items():
            of = lambda flops: round(100 * flops / (ms / 1e3) / hopper.PEAK_FLOPS)
            self.assertEqual(of(known[name].flops), share)
            self.assertGreater(of(known[name].flops_uncut), share)

    def test_operations_and_parameters_of_a_preset(self):
        qwen = workloads.all_workloads()["qwen2.5-1.5b"]
        # 1536 x (2 x 1536 + 2 x 256) + 3 x 1536 x 8960, of 28 layers, and 1536 x 151936.
        self.assertEqual(qwen.model.product_weights, 28 * 46_792_704 + 233_373_696)
        self.assertEqual(qwen.flops, 32768 * (6 * 1_543_569_408 + 6 * 28 * 1536 * 1024))
        self.assertEqual(qwen.attention_flops, 2 * 32 * 1536 * 1024**2)
        llama = workloads.all_workloads()["llama-3-8b"]
        self.assertAlmostEqual(llama.model.parameters / 1e9, 8.03, places=2)
        # 112 GB an update: the close reading's figure.
        self.assertEqual(round(llama.states.update_bytes * llama.model.parameters / 1e9), 112)


# Kernels that came later, and the one that went then.
LATER = {"flash_add_parts_bf16", "rms_norm_backward_wide_bf16", "split_qkv_bf16", "join_qkv_bf16"}
EARLIER = {"rms_norm_dweight_bf16", "add_bias_bf16"}


class Steps(unittest.TestCase):
    def tree(self, without=LATER, **changes):
        tile = dataclasses.replace(STREAM, registers=168, threads=128, tile=Attention.TILE)
        products = {"flash_backward_queries_128_bf16": 96, "flash_backward_keys_128_bf16": 128}
        kernels = {name: STREAM for names in launches.SOURCES.values() for name in names if name not in without}
        if "flash_add_parts_bf16" in kernels:
            # Two products of 32 rows by 32.
            products["flash_backward_keys_128_bf16"] = 64
        for name in launches.SOURCES["flash_attention"][:3]:
            kernels[name] = dataclasses.replace(tile, tile=dataclasses.replace(Attention.TILE, hmma=products.get(name, 128)))
        return dataclasses.replace(trees.Tree("here", kernels, 512, False), **changes)

    def test_launches_are_those_of_the_stages(self):
        workload = workloads.all_workloads()["llama-3-8b"]
        made = trees.estimate(self.tree(), workload)
        # 21 products and 3 of attention; 2 norms, 2 of 3 launches backward, SwiGLU twice, rotary four times, row sums.
        layer, chunk = 21 + 3 + 2 + 6 + 2 + 4 + 1, 3 + 1 + 1 + 3
        self.assertAlmostEqual(made.launches(), 32 * layer + 16 * chunk + 2 + 2 / 8)
        biased = workloads.all_workloads()["qwen2.5-1.5b"]
        self.assertAlmostEqual(trees.estimate(self.tree(), biased).launches(), 28 * (layer + 9) + 64 * chunk + 2 + 2 / 16)

    def test_launches_are_fewer_where_stages_are_one(self):
        made = trees.estimate(self.tree(EARLIER), workloads.all_workloads()["llama-3-8b"])
        # 12 products; norms backward are two launches each; queries, keys and values are taken apart and joined.
        layer, chunk = 12 + 3 + 2 + 4 + 2 + 2 + 1, 3 + 1 + 1 + 2
        self.assertAlmostEqual(made.launches(), 32 * layer + 16 * chunk + 2 + 2 / 8)
        biased = workloads.all_workloads()["qwen2.5-1.5b"]
        self.assertAlmostEqual(trees.estimate(self.tree(EARLIER), biased).launches(), 28 * (layer + 2) + 64 * chunk + 2 + 2 / 16)

    def test_few_heads_are_parted_among_more_blocks(self):
        kernels, known = self.tree(EARLIER).kernels, workloads.all_workloads()["qwen2.5-1.5b"]
        of = lambda batch: dataclasses.replace(known, batch=batch)
        # 32, 256 and 1,024 blocks of 64 keys; a key-value head has six query heads.
        self.assertEqual([launches.key_parts(kernels, of(batch)) for batch in (1, 8, 32)], [6, 2, 1])
        self.assertEqual(launches.key_parts(self.tree().kernels, of(1)), 1)
        sums, added = launches.beside_attention(kernels, of(8))
        self.assertEqual((sums.blocks, added.bytes, added.loads), (8192 * 2, 2 * 8192 * 256 * (2 * 4 + 2), 4))
        self.assertEqual(len(launches.beside_attention(kernels, known)), 1)

    def test_one_pass_reads_a_norms_operands_once(self):
        rows, width = 8192, 4096
        bytes_of = lambda code: sum(each.bytes for each in launches.norm_backward(code, rows, width, 2))
        apart, together = bytes_of(self.tree().kernels), bytes_of(self.tree(EARLIER).kernels)
        # Parts of f32: 32 of 256 rows, and 512 of 16; written, read, and a gradient of bf16 that is added to.
        parts = lambda count: 2 * 4 * count * width + 4 * width
        self.assertEqual((apart, together), (6 * 2 * rows * width + parts(32), 4 * 2 * rows * width + parts(512)))

    def test_a_blocks_threads_go_through_its_rows(self):
        kernels = self.tree(EARLIER).kernels
        narrow, _ = launches.norm_backward(kernels, 32768, 1536, 4)
        self.assertEqual((narrow.kernel, narrow.blocks, narrow.threads, narrow.loads), ("rms_norm_backward_bf16", 1024, 192, 8 * 32))
        wide, _ = launches.norm_backward(kernels, 1024, 8192, 4)
        self.assertEqual((wide.kernel, wide.blocks, wide.threads), ("rms_norm_backward_wide_bf16", 64, 256))
        self.assertEqual(launches.add_parts(kernels, 1024, 1536, 4).loads, 2 * 8)
        self.assertEqual(launches.add_parts(self.tree().kernels, 128, 1536, 4).loads, 2 * 128)

    def test_rows_add_up_to_the_whole(self):
        made = trees.estimate(self.tree(), workloads.all_workloads()["llama-3-8b"])
        self.assertAlmostEqual(made.ms(), sum(map(made.row_ms, step.ROWS)))
        self.assertAlmostEqual(made.row_ms(step.PRODUCTS), 6 * 6_979_321_856 * 8192 / 700e9 + 32 * 21 * 2.5e-3, delta=0.5)

    def test_a_chunk_is_as_large_as_it_pays(self):
        workload = workloads.all_workloads()["qwen2.5-1.5b"]
        times = {chunk: trees.estimate(self.tree(), workload, head_chunk=chunk).ms() for chunk in trees.CHUNKS}
        chosen = trees.estimate(self.tree(head_chunk=None), workload)
        best = min(times.values())
        self.assertEqual(chosen.settings.head_chunk, min(chunk for chunk, ms in times.items() if ms <= best * 1.005))
        # Gradients of f32 go through memory once a chunk: 1.87 GB, as long as 1,024 tokens' product nearly.
        self.assertGreater(times[512] - chosen.ms(), 10)

    def test_what_is_recomputed_is_launched_again(self):
        workload = workloads.all_workloads()["llama-3-8b"]
        kept, again = (trees.estimate(self.tree(), workload, recomputes_act=each) for each in (False, True))
        self.assertAlmostEqual(again.launches() - kept.launches(), 32)
        # Three tensors of 8,192 tokens by 14,336 a layer, in bf16; a little more for what does not hide.
        self.assertAlmostEqual(again.ms() - kept.ms(), 32 * 1e3 * (3 * 2 * 8192 * 14336 / 3e12 + 2.5e-6), delta=0.7)

    def test_graphs_shorten_gaps_and_spare_the_host(self):
        workload = workloads.all_workloads()["llama-3-8b"]
        plain, graphs = (trees.estimate(self.tree(graphs=graphs), workload) for graphs in (False, True))
        self.assertAlmostEqual(plain.ms() - graphs.ms(), 1e3 * (hopper.GAP_S - hopper.GRAPH_GAP_S) * plain.launches())

    def test_parts_come_one_after_the_other(self):
        before = self.tree()
        faster = {name: dataclasses.replace(each, instructions=each.instructions / 2) for name, each in before.kernels.items()}
        after = trees.Tree("later", faster, None, True)
        seen = [tree for _, tree in trees.steps_between(before, after)]
        self.assertEqual(seen[0].kernels["flash_row_sums_bf16"], faster["flash_row_sums_bf16"])
        self.assertEqual(seen[0].kernels["swiglu_bf16"], STREAM)
        self.assertEqual(seen[1].kernels["rms_norm_bf16"], STREAM)
        self.assertEqual((seen[2].kernels, seen[2].head_chunk), (faster, 512))
        self.assertEqual((seen[-1].kernels, seen[-1].head_chunk, seen[-1].graphs), (faster, None, True))


class Tables(unittest.TestCase):
    def test_what_is_far_from_the_close_reading_is_named(self):
        class Estimated:
            def __init__(self, changed):
                self.rows = dict(zip(step.ROWS, tables.CLOSE_READING["llama-3-8b"][0])) | changed
            def row_ms(self, row):
                return self.rows[row]
            def ms(self):
                return 1020
        self.assertEqual(tables.deviations("llama-3-8b", Estimated({})), [])
        found = tables.deviations("llama-3-8b", Estimated({step.FORWARD: 92}))
        self.assertEqual(len(found), 1)
        self.assertIn("attention forward: 92.0 ms, and 85", found[0])
        # Of a row of 7 ms a tenth says nothing.
        self.assertEqual(tables.deviations("llama-3-8b", Estimated({step.UPDATE: 9})), [])

    def test_tables_for_people_and_for_pages(self):
        rows = [["a", "b"], ["long", "1"]]
        self.assertEqual(tables.rendered(rows, True), "| a | b |\n|---|---:|\n| long | 1 |")
        self.assertEqual(tables.rendered(rows, False), "a     b\nlong  1")


if __name__ == "__main__":
    unittest.main()
