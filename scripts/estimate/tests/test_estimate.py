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

from estimate import attention, calls, clock, code, hopper, loops, products, step, tables, trees
from estimate.calls import Call, Listing
from estimate.code import Counted, Tile
from estimate.workloads import WORKLOADS
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
            clock.kernel_seconds(dataclasses.replace(STREAM, shared_bytes=150_000), clock.Launch("x", 1, 256, 0, shared_bytes=150_000))

    def test_what_is_left_of_a_wave_takes_as_long_as_its_own(self):
        one, two = (clock.kernel_seconds(STREAM, clock.Launch("x", blocks, 256, 0)) for blocks in (8 * 132, 16 * 132))
        more = clock.kernel_seconds(STREAM, clock.Launch("x", 8 * 132 + 1, 256, 0))
        self.assertAlmostEqual(two, 2 * one)
        self.assertAlmostEqual(more, one + 8 * 130 / 4 / hopper.CLOCK_HZ)


def flash(of, blocks, seq=1024, heads=1, batch=1, parts=1, **changes):
    """A launch of flash attention with heads of 128, of two for each key-value head where there are two."""
    numbers = (seq, heads, max(heads // 2, 1), 128, 0)
    keys = of == "flash_backward_keys"
    of_heads = numbers[2] * parts if keys else heads
    operation = "flash_attention" if of == "flash_forward" else "flash_attention_backward"
    call = Call(operation, 1, kernel=f"{of}_128_bf16", source="flash_attention", grid=(batch, of_heads, blocks), block=(128, 1, 1),
                shared_bytes=52_224, numbers=(parts, *numbers) if keys else numbers)
    return dataclasses.replace(call, **changes)


class Attention(unittest.TestCase):
    TILE = Tile(instructions=640, hmma=128, ldsm=72, shared_bytes=72 * 512, copies=16)
    COUNTED = Counted(168, 128, 0, 1040, 0, 0, 0, 0, TILE)

    def test_rows_follow_from_the_products(self):
        own = attention.own_rows(self.TILE)
        self.assertEqual((own, attention.passing_rows(self.TILE, own, 2, 128)), (16, 64))
        shared = dataclasses.replace(self.TILE, hmma=256, ldsm=80)
        own = attention.own_rows(shared)
        self.assertEqual((own, attention.passing_rows(shared, own, 2, 128)), (32, 64))
        with self.assertRaisesRegex(code.Unexpected, "128 mma"):
            attention.passing_rows(self.TILE, 16, 3, 128)

    def test_a_tile_takes_what_is_busiest_and_half_of_the_rest(self):
        shape = attention.shape_of(self.COUNTED, flash("flash_forward", 16))
        self.assertEqual((shape.rows, shape.passing, shape.warps, shape.blocks), (64, 64, 4, 3))
        issue, shared, tensor = 160, 288, 128 * 4096 / (4096 * 0.62)
        self.assertEqual(shape.busy, {"issue": issue, "shared memory": shared, "tensor cores": tensor})
        self.assertAlmostEqual(shape.clocks(3), shared + (issue + tensor) / 2)
        self.assertEqual(shape.outside, 100)

    def test_paired_warps_have_half_of_the_rows_and_of_the_parts(self):
        tile = dataclasses.replace(self.TILE, hmma=128, ldsm=40, of_parts=80, bytes_of_parts=1024)
        counted = dataclasses.replace(self.COUNTED, tile=tile)
        shape = attention.shape_of(counted, flash("flash_backward_keys", 16))
        # Two products of 32 rows by 32; four warps have 64 rows.
        self.assertEqual((shape.rows, shape.passing), (64, 32))
        self.assertEqual((shape.busy["issue"], shape.busy["shared memory"]), (150, 72 * 4 - 4))

    def test_blocks_are_taken_in_their_order(self):
        self.assertEqual(attention.longest_slot([4, 3, 2, 1], 2), 5)
        self.assertEqual(attention.longest_slot([1, 2, 3, 4], 2), 6)
        self.assertEqual(attention.longest_slot([7], 2), 7)

    def test_a_block_alone_takes_its_tiles_and_what_is_around_them(self):
        seconds = attention.seconds(self.COUNTED, flash("flash_forward", 1, seq=64))
        clocks = 288 + 160 + 128 / 0.62  # One warp a scheduler: all of it.
        self.assertAlmostEqual(seconds, 4 * (clocks + 100) / hopper.CLOCK_HZ)
        # Two blocks of rows on two multiprocessors: the longer has two tiles.
        longer = attention.seconds(self.COUNTED, flash("flash_forward", 2, seq=128))
        self.assertAlmostEqual(longer - seconds, 4 * clocks / hopper.CLOCK_HZ)

    def test_a_block_of_keys_goes_through_the_sequence_for_each_of_its_query_heads(self):
        # 16 rows of a warp by 64, four times; two query heads for a key-value head, one after the other or in blocks of their own.
        keys = dataclasses.replace(self.COUNTED, tile=dataclasses.replace(self.TILE, hmma=256, ldsm=144))
        both, one = (attention.seconds(keys, flash("flash_backward_keys", 16, heads=2, batch=132 // parts, parts=parts))
                     for parts in (1, 2))
        self.assertGreater(both, 1.9 * one)
        self.assertLess(both, 2 * one)

    def test_what_does_not_fit_or_multiplies_nothing_is_refused(self):
        for change, said in ((dict(tile=None), "no loop with products"), (dict(shared_bytes=300_000), "has room")):
            with self.assertRaisesRegex(code.Unexpected, said):
                attention.shape_of(dataclasses.replace(self.COUNTED, **change), flash("flash_forward", 16))


def launch(kernel, grid, block, numbers, bytes=0):
    return Call("x", 1, kernel=kernel, grid=grid, block=block, numbers=numbers, bytes=bytes)


class Loops(unittest.TestCase):
    """On launches as the example lists them."""

    def loads_and_bytes(self, *of):
        return loops.loads_and_bytes(launch(*of), STREAM)

    def test_a_pack_a_thread_is_one_turn(self):
        self.assertEqual(self.loads_and_bytes("swiglu_bf16", (8192, 14, 1), (128, 1, 1), (14336,), 7), (None, 7))
        self.assertEqual(self.loads_and_bytes("rms_norm_bf16", (8, 1, 1), (192, 1, 1), (8, 1536), 7), (3, 7))
        self.assertEqual(self.loads_and_bytes("rms_norm_bf16", (8, 1, 1), (512, 1, 1), (8, 8192), 7), (6, 7))
        self.assertEqual(self.loads_and_bytes("cross_entropy_bf16", (512, 1, 1), (512, 1, 1), (128256,), 7), (2 * 32, 7))

    def test_a_blocks_threads_go_through_its_rows_and_leave_parts(self):
        norm = self.loads_and_bytes("rms_norm_backward_bf16", (1024, 1, 1), (192, 1, 1), (32768, 32, 1536, 1), 7)
        self.assertEqual(norm, (8 * 32, 7 + 4 * 1024 * 1536))
        self.assertEqual(self.loads_and_bytes("add_parts_f32", (48, 1, 1), (4, 128, 1), (1024, 1536, 0)), (2 * 8, 4 * 1024 * 1536))
        bias = self.loads_and_bytes("bias_backward_bf16", (64, 16, 1), (4, 128, 1), (2048, 32768, 2048, 2048), 7)
        self.assertEqual(bias, (16, 7 + 4 * 16 * 2048))

    def test_an_operations_bytes_are_not_those_of_its_first_launch_in_flash_attention(self):
        # Two tensors of bf16, and a sum a row.
        sums = self.loads_and_bytes("flash_row_sums_bf16", (8192, 4, 1), (128, 1, 1), (8192, 32, 128, 16), 7)
        self.assertEqual(sums, (None, 8192 * 32 * (4 * 128 + 4)))
        added = self.loads_and_bytes("flash_add_parts_bf16", (1024, 2, 1), (256, 1, 1), (2, 8192 * 256))
        self.assertEqual(added, (4, 2 * 8192 * 256 * (2 * 4 + 2)))

    def test_an_updates_warps_take_so_many_turns(self):
        update = self.loads_and_bytes("adamw_split_8bit_bf16", (10, 1, 1), (256, 1, 1), (512, 10 * 16384), 7)
        self.assertEqual(update, (8 * 8, 7))
        self.assertEqual(self.loads_and_bytes("norm_grains_f32", (10, 1, 1), (32, 8, 1), (10 * 8 * 4096,), 7), (2 * 16, 7))

    def test_what_is_read_from_a_file_says_its_loads(self):
        told = Call("x", 1, kernel="rms_norm_backward_bf16", loads=7, bytes=9)
        self.assertEqual(loops.loads_and_bytes(told, STREAM), (7, 9))


class Products(unittest.TestCase):
    @staticmethod
    def seconds(m, n, k, tuned=1.0, **more):
        product = dict(m=m, n=n, k=k, **more)
        return products.seconds(product, 2 * (m * k + k * n + m * n), tuned)

    def rate(self, *sizes):
        m, n, k = sizes
        return 2 * m * n * k / self.seconds(*sizes)

    def test_a_large_product_is_held_by_power(self):
        self.assertAlmostEqual(self.seconds(8192, 8192, 8192), 2 * 8192**3 / 670e12)
        self.assertAlmostEqual(self.seconds(8192, 8192, 8192, 1.25), 2 * 8192**3 / 670e12 / 1.25)

    def test_a_tile_beyond_a_wave_costs_another(self):
        # 132 tiles of 128 x 256 fill the multiprocessors.
        of = lambda rows, columns: products.computing_seconds(rows, columns, 16384, (128, 256, 1.0), 1)
        full = of(12 * 128, 11 * 256)
        self.assertAlmostEqual(full, 2 * 128 * 256 * 16384 * 132 / 800e12 + 1.2e-6)
        self.assertAlmostEqual(of(12 * 128, 11 * 256 + 8), 2 * full)
        # At the edge of the result a tile is computed whole.
        self.assertAlmostEqual(of(12 * 128 - 8, 11 * 256 - 8), full)
        # Power limits the full wave more than its tiles do; what fills it badly is slower than that.
        self.assertAlmostEqual(self.rate(12 * 128, 11 * 256, 16384) / 670e12, 1)
        self.assertLess(self.rate(12 * 128, 13 * 256, 16384), 0.9 * 670e12)

    def test_a_short_k_waits_more_than_it_computes(self):
        self.assertLess(self.rate(8192, 8192, 64), self.rate(8192, 8192, 512))
        self.assertLess(self.rate(8192, 8192, 512), 670e12)

    def test_a_small_result_is_computed_in_parts_of_k(self):
        whole = min(products.computing_seconds(256, 1536, 32768, tile, 1) for tile in products.TILES)
        self.assertLess(self.seconds(256, 1536, 32768), whole)
        self.assertLess(self.rate(256, 1536, 32768), 600e12)

    def test_several_products_in_one_call_fill_waves_together(self):
        self.assertAlmostEqual(self.seconds(1024, 2048, 4096, batch=8), self.seconds(8192, 2048, 4096))

    def test_half_of_what_is_added_to_takes_time_of_its_own(self):
        product, moved = dict(m=8192, n=8192, k=8192), 4 * 8192**2 + 8 * 8192**2
        plain = products.seconds(product, moved)
        self.assertAlmostEqual(products.seconds(product | {"adds": True}, moved) - plain, 4 * 8192**2 / 3e12)
        # A gradient of f32, and few tokens: nothing hides it.
        moved = 2 * 2 * 8192 * 64 + 8 * 8192**2
        self.assertAlmostEqual(products.seconds(dict(m=8192, n=8192, k=64, adds=True), moved), moved / 3e12)


# A millisecond.
PRODUCT = dict(flops=670 * 10**9, bytes=0, product={"m": 10**4, "n": 10**4, "k": 3350})
KERNELS = code.Kernels({"flash_forward_128_bf16": Attention.COUNTED, "swiglu_bf16": STREAM, "adamw_x": STREAM})


class Steps(unittest.TestCase):
    """A product of a millisecond in each row that has products, attention, and what is in no row of its own."""
    CALLS = (
        Call("matmul", 2, **PRODUCT),
        Call("matmul", 1, layer="head", **PRODUCT),
        flash("flash_forward", 16, heads=132),
        Call("swiglu", 4, kernel="swiglu_bf16", source="swiglu", numbers=(64,)),
        Call("adamw", 0.5, phase="optimizer", kernel="adamw_x", source="adamw", numbers=(0, 256)),
        Call("embedding_backward", 1, layer="embedding", bytes=3 * 10**9),
    )

    def step(self, calls=CALLS, **by):
        return step.step_of(Listing(1024, 512, tuple(calls)), KERNELS, **by)

    def test_calls_stand_in_their_rows_with_a_gap_each(self):
        made = self.step()
        self.assertAlmostEqual(made.row_ms(step.PRODUCTS), 2 * (1 + 2.5e-3))
        self.assertAlmostEqual(made.row_ms(step.HEAD), 1 + 2.5e-3)
        self.assertAlmostEqual(made.row_ms(step.FORWARD), 1e3 * attention.seconds(Attention.COUNTED, self.CALLS[2]) + 2.5e-3)
        self.assertEqual(made.row_ms(step.BACKWARD), 0)
        # Without kernel and product, at the speed of memory.
        self.assertGreater(made.row_ms(step.OTHERS), 1)
        self.assertGreater(made.row_ms(step.UPDATE), 0)
        self.assertAlmostEqual(made.ms(), sum(map(made.row_ms, step.ROWS)))
        self.assertEqual(made.launches(), 9.5)

    def test_operations_are_those_of_products_and_attention_without_recompute(self):
        forward = 2 * 2 * 132 * 128 * 1024**2 / 2
        again = [*self.CALLS, *(dataclasses.replace(call, phase="recompute") for call in self.CALLS[:4])]
        for calls in (self.CALLS, again):
            made = self.step(calls)
            self.assertEqual((made.flops, made.flops_uncut), (2010e9 + 3 * forward, 2010e9 + 6 * forward))

    def test_cudnn_takes_the_place_of_all_launches_of_attention(self):
        calls = [*self.CALLS, flash("flash_backward_queries", 16), Call("flash_attention_backward", 1, kernel="swiglu_bf16")]
        made = self.step(calls, cudnn=True)
        forward, backward = attention.cudnn_seconds(1024, 2 * 2 * 132 * 128 * 1024**2 / 2)
        self.assertAlmostEqual(made.row_ms(step.FORWARD), 1e3 * forward + 2.5e-3)
        self.assertAlmostEqual(made.row_ms(step.BACKWARD), 1e3 * backward + 2.5e-3)
        self.assertEqual(made.launches(), 9.5 + 1)

    def test_tuning_makes_products_faster(self):
        self.assertAlmostEqual(self.step(tuned=1.25).row_ms(step.PRODUCTS), 2 * (1 / 1.25 + 2.5e-3))

    def test_graphs_shorten_gaps_and_spare_the_host(self):
        graphs = self.step(dataclasses.replace(call, in_graph=True) for call in self.CALLS)
        self.assertAlmostEqual(self.step().ms() - graphs.ms(), 1e-3 * 9.5)
        many = [Call("swiglu", 10**6, bytes=1)]
        self.assertAlmostEqual(self.step(many).ms(), 1e6 * 5e-3)
        self.assertAlmostEqual(self.step([dataclasses.replace(many[0], in_graph=True)]).ms(), 1e6 * 1.5e-3, delta=1)

    def test_parts_come_one_after_the_other(self):
        twice = lambda product: product and product | {"k": 2 * product["k"]}
        before = self.step(dataclasses.replace(call, product=twice(call.product), bytes=2 * call.bytes) for call in self.CALLS)
        after = self.step(dataclasses.replace(call, in_graph=True) for call in self.CALLS)
        seen = dict(trees.steps_between(before, after))
        rows = lambda title: [round(seen[title].row_ms(row)) for row in (step.PRODUCTS, step.HEAD, step.OTHERS)]
        self.assertEqual(rows("attention of our own"), [4, 2, 2])
        self.assertEqual(rows("the head's chunk, and its kernels"), [4, 1, 2])
        self.assertEqual(rows("q k v and gate up in one, bias in the product"), [2, 1, 2])
        self.assertEqual(rows("reductions, alignment, AdamW"), [2, 1, 1])
        self.assertEqual(seen["reductions, alignment, AdamW"].launches(), after.launches())
        self.assertIs(seen["micro-batches as graphs"], after)


class Listings(unittest.TestCase):
    def test_a_steps_calls_are_shared_out_among_its_micro_batches(self):
        row = {"operation": "fill", "times": 12, "grid": [2, 3, 1], "block": [4, 128, 1]}
        listing = calls.parsed({"tokens": 64, "micro_batches": 8, "head_chunk": 512, "calls": [row]})
        [call] = listing.calls
        self.assertEqual((listing.tokens, call.times, call.blocks, call.threads), (64, 1.5, 6, 512))

    def test_the_close_readings_percentages_are_of_causal_operations(self):
        for name, (_, ms, share) in tables.CLOSE_READING.items():
            listing = calls.of_file(trees.READ_LISTINGS, name)
            attention_alone = [call for call in listing.calls if call.product or call.operation == "flash_attention"]
            made = step.step_of(dataclasses.replace(listing, calls=tuple(attention_alone)), KERNELS)
            of = lambda flops: round(100 * flops / (ms / 1e3) / hopper.PEAK_FLOPS)
            self.assertEqual(of(made.flops), share)
            self.assertGreater(of(made.flops_uncut), share)

    def test_the_launch_code_lists_what_is_estimated(self):
        """As many operations as c5abdaf had, and kernels whose arguments are those that are expected of them."""
        for name, workload in WORKLOADS.items():
            listing, before = calls.parsed(calls.written(workload.preset, workload.settings)), calls.of_file(trees.READ_LISTINGS, name)
            products = lambda listing: sum(call.flops * call.times for call in listing.calls if call.product)
            self.assertEqual(listing.tokens, before.tokens)
            self.assertAlmostEqual(products(listing) / products(before), 1, places=9)
            for call in listing.calls:
                if call.kernel and attention.pass_of(call.kernel):
                    sizes = attention.Sizes.of(call)
                    self.assertEqual((sizes.seq, sizes.head_dim), (workload.seq, 128))
                elif call.kernel:
                    # By other arguments there would be none, or far more.
                    loads, _ = loops.loads_and_bytes(call, STREAM)
                    self.assertTrue(loads is None or 1 <= loads <= 2048, call)

    def test_what_is_recomputed_is_listed_again(self):
        workload = WORKLOADS["llama-3-8b"]
        again = calls.parsed(calls.written(workload.preset, [*workload.settings, trees.RECOMPUTED]))
        [swiglu] = {(call.kernel, call.layer) for call in again.calls if call.phase == "recompute"}
        self.assertEqual(swiglu, ("swiglu_bf16", "block"))

    def test_what_cannot_be_listed_is_a_sentence(self):
        with self.assertRaisesRegex(calls.NotListed, "nothing-is-called-this"):
            calls.written("nothing-is-called-this", [])


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

    def test_the_close_readings_figures_stand_in_their_rows(self):
        made = Steps().step()
        rows = tables.with_close_reading("llama-3-8b", tables.by_row({"now": made}, [[made, made]]))
        read = {row[0]: row[1] for row in rows}
        self.assertEqual((read["the whole"], read["% of 989 TFLOP/s, causal operations"]), ("1020", "42"))
        self.assertEqual(read["the whole, large products at 700 to 640 TFLOP/s"], "")

    def test_tables_for_people_and_for_pages(self):
        rows = [["a", "b"], ["long", "1"]]
        self.assertEqual(tables.rendered(rows, True), "| a | b |\n|---|---:|\n| long | 1 |")
        self.assertEqual(tables.rendered(rows, False), "a     b\nlong  1")


if __name__ == "__main__":
    unittest.main()
