"""Tests how the sections judge the files of runs; no binary and no GPU is needed.

  python3 -m unittest discover -s scripts/gpu/tests
"""
import copy
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
import zlib
from types import SimpleNamespace

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from verification import gpu, libraries, report, results, schedule, tensors
from verification.case import Case
from verification.commands import Clock, CommandList, Finished, run
from verification.metrics import Metrics
from verification.outcome import FAIL, NO_TIME, PASS, SKIPPED, Failed, Findings, Outcome, OutOfTime, Skipped
from verification.sections import ALWAYS, HEADLINES, LATE, SECTIONS, cases, conformance, doctor, graphs, homes, kernels, models, modes, operations, plan, preflight, protocol, rehearsal, robust, sanitizer, speed, tuning
from verification.sources import Tree

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent


def script(name):
    """A script without an extension, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / "gpu" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


build = script("build")

# Steps of a real run, shortened; the device's marks are made up.
RUN = '{"kind":"run","version":"0.1.0","device":"cuda","granularity_bytes":256,"flops_per_token":1597440}'
STEP = {"kind": "step", "step": 1, "loss": 5.533423, "grad_norm": 3.733399, "finite": True, "tokens": 2048, "step_ms": 78.734,
        "tokens_per_s": 26011.5, "peak_bytes": 20739072, "planned_peak_bytes": 20739072, "slab_bytes": 17217536,
        "replayed": {"core_attn": 8}, "device_used_high_bytes": 20739584, "device_reserved_high_bytes": 33554432,
        "device_total_used_bytes": 533554432, "driver_allocations": 0, "h2d_bytes": 16384, "d2h_bytes": 12}
PLAN = {"peak_bytes": 20739072, "slab_bytes": 17217536, "reserved_bytes": 20739072, "device_overhead_bytes": 671088640}


def metrics(*changes):
    """A run of a step for each change."""
    steps = [json.dumps({**STEP, "step": number, **change}) for number, change in enumerate(changes, 1)]
    return Metrics.parse("\n".join([RUN, *steps, '{"kind":"end","reason":"done"}']))


class Reading(unittest.TestCase):
    def test_metrics_are_read_by_kind(self):
        read = metrics({}, {"loss": 5.4})
        self.assertEqual(read.header["device"], "cuda")
        self.assertEqual(read.bits(), [(5.533423, 3.733399), (5.4, 3.733399)])
        self.assertEqual((read.replayed(), read.end["reason"], read.is_finite()), ((("core_attn", 8),), "done", True))
        self.assertFalse(metrics({"loss": None, "finite": False}).is_finite())

    def test_safetensors_are_read_as_floats(self):
        header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                             "b": {"dtype": "BF16", "shape": [1], "data_offsets": [8, 10]}}).encode()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "x"
            path.write_bytes(len(header).to_bytes(8, "little") + header + bytes.fromhex("0000803f000000c0" "4040"))
            read = tensors.read_safetensors(path)
        self.assertEqual({name: list(values) for name, values in read.items()}, {"a": [1.0, -2.0], "b": [3.0]})

    def test_a_missing_tensor_or_a_nan_is_as_far_as_can_be(self):
        difference = lambda actual: tensors.largest_difference(actual, {"a": [1.0, 4.0]}, True)[0]
        self.assertEqual(difference({"a": [1.0, 5.0]}), 0.25)
        for wrong in ({}, {"a": [1.0]}, {"a": [1.0, float("nan")]}, {"b": [1.0, 4.0]}):
            self.assertEqual(difference(wrong), float("inf"))

    def test_errors_of_the_conformance_suite(self):
        said = ("running 2 tests\ntest refusals::any ... ok\ncpu for F32: out: 80.0 % of the allowed error\n"
                "test norm ... NVIDIA H200 for BF16: dq of it: 12.5 % of the allowed error\ntest norm ... FAILED\n")
        self.assertEqual(conformance.shares(said), {("NVIDIA H200", "dq of it", "BF16"): 12.5})

    def test_a_case_of_the_conformance_suite_ends_with_its_last_test(self):
        ended = []
        tests = conformance.Tests([("norm", "norm"), ("others", "refusals::a"), ("others", "refusals::b"), ("fp8", "fp8")],
                                  lambda case, status, reason, found: ended.append((case, status, found.figures["passed"])))
        for line in ("test refusals::a ... ok\n", "noise\n", "test norm ... FAILED\n", "test refusals::b ... ok\n"):
            tests.line(line)
        self.assertEqual(ended, [("norm", FAIL, 0), ("others", PASS, 2)])
        tests.close("fp8", (NO_TIME, "stopped"))
        self.assertEqual(ended[-1][:2], ("fp8", NO_TIME))

    def test_versions_compare_as_numbers(self):
        self.assertLess(libraries.version_pair("glibc 2.4"), libraries.version_pair("2.36"))
        self.assertIsNone(libraries.glibc_complaint("2.2"))
        self.assertIn("need glibc 9.0, and this machine has glibc", libraries.glibc_complaint("9.0"))

    def test_the_newest_cublaslt_that_the_driver_starts_is_preferred(self):
        with tempfile.TemporaryDirectory() as root:
            folders = {name: pathlib.Path(root) / name for name in ("cu13", "cublas", "system")}
            for (name, folder), library in zip(folders.items(), ("libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so")):
                folder.mkdir()
                (folder / library).touch()
            preferred = lambda driver: [folder.name for folder in libraries.by_preference(folders.values(), driver)]
            self.assertEqual(preferred(13), ["cu13", "cublas", "system"])
            self.assertEqual(preferred(None), ["cu13", "cublas", "system"])
            self.assertEqual(preferred(12), ["cublas", "system", "cu13"])

    def test_the_gpu_is_the_one_that_cuda_gives(self):
        for named, selected in ((None, "0"), ("3,1", "3"), ("GPU-5f", "GPU-5f")):
            with unittest.mock.patch.dict("os.environ", {} if named is None else {"CUDA_VISIBLE_DEVICES": named}):
                if named is None:
                    gpu.os.environ.pop("CUDA_VISIBLE_DEVICES", None)
                self.assertEqual(gpu.selected(), selected)
        with unittest.mock.patch.dict("os.environ", CUDA_VISIBLE_DEVICES=""), self.assertRaises(Failed):
            gpu.selected()

    def test_a_watch_ends_whatever_it_is_told(self):
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(gpu, "SECONDS_TO_END", 0.2), \
                unittest.mock.patch.dict("os.environ", PATH=f"{folder}:{os.environ['PATH']}"):
            program = pathlib.Path(folder) / "nvidia-smi"
            # The first ends when it is told to, the second does not.
            for script, expected in (("echo 1700, [N/A], 99; exec sleep 60", (1700.0, None)), ("trap '' TERM; echo 1700, 1.0, 99; while true; do sleep 0.1; done", (1700.0, 1.0))):
                program.write_text(f"#!/bin/bash\n{script}\n")
                program.chmod(0o755)
                with gpu.Watch() as watch:
                    time.sleep(0.3)
                self.assertEqual((watch.sm_mhz, watch.watts), expected)

    def test_clocks_are_those_of_a_busy_gpu(self):
        self.assertEqual(gpu.medians("345, 80.0, 0\n1700, 690.0, 99\n1800, 700.0, 100\nbroken\n"), (1750.0, 695.0))
        self.assertEqual(gpu.medians("345, 80.0, 0\n"), (None, None))
        self.assertEqual(gpu.medians("1700, [N/A], 99\n1800, [N/A], 100\n[N/A], 1.0, [N/A]\n"), (1750.0, None))


class Judging(unittest.TestCase):
    def test_a_plan_and_a_constant_pass(self):
        figures = plan.compare(PLAN, metrics({"driver_allocations": 5}, {}, {}), True)
        plan.judge("run", figures)
        self.assertEqual((figures["difference_bytes"], figures["overhead_bytes"]), (512, 500000000))

    def test_one_step_is_compared_with_the_plan_and_may_allocate(self):
        plan.judge("run", plan.compare(PLAN, metrics({"driver_allocations": 5}), True))
        with self.assertRaises(Failed):
            plan.judge("run", plan.compare(PLAN, metrics({"device_used_high_bytes": 20000000}), True))

    def test_every_disagreement_with_the_plan_fails(self):
        for change in ({"peak_bytes": 1}, {"planned_peak_bytes": 1}, {"slab_bytes": 1}, {"driver_allocations": 1},
                       {"device_used_high_bytes": 20739585}, {"device_total_used_bytes": 733554432}):
            figures = plan.compare(PLAN, metrics({}, {}, change), True)
            with self.assertRaises(Failed, msg=change):
                plan.judge("run", figures)
        below = metrics({}, *[{"device_used_high_bytes": 20000000}] * 2)
        with self.assertRaises(Failed):
            plan.judge("run", plan.compare(PLAN, below, True))

    def family(self):
        """A run for each mode, and the first again."""
        none = metrics(*({"loss": 5.0 - step, "replayed": {}} for step in range(modes.STEPS)))
        others = [metrics(*({"loss": 5.0 - step, "peak_bytes": 1000 + mode, "replayed": {"mlp": mode + 1}}
                            for step in range(modes.STEPS))) for mode in range(len(modes.MODES) - 1)]
        return [none, *others, copy.deepcopy(none)]

    def test_modes_that_differ_in_memory_alone_pass(self):
        modes.judge("f32", self.family())

    def test_modes_that_differ_in_bits_or_do_the_same_fail(self):
        for index, change in ((3, {"loss": 1.0}), (3, {"replayed": {"mlp": 1}}), (3, {"peak_bytes": 30000000}), (-1, {"loss": 1.0})):
            family = self.family()
            family[index].steps[-1].update(change)
            with self.assertRaises(Failed, msg=change):
                modes.judge("f32", family)

    @staticmethod
    def kinds():
        """A run, and the same recomputed, as the section `models` makes them."""
        runs = [[{"loss": 5.0 - step, "replayed": replayed} for step in range(models.STEPS)] for replayed in ({}, {"mlp": 8})]
        return [SimpleNamespace(metrics=metrics(*steps)) for steps in runs]

    def test_models_that_keep_bits_and_plans_and_are_near_the_cpu_pass(self):
        models.judge("experts", *self.kinds(), 2e-6, models.NEAR)

    def test_models_that_are_far_from_the_cpu_or_change_bits_fail(self):
        for index, change in ((1, {"loss": 1.0}), (1, {"replayed": {}}), (0, {"peak_bytes": 1}), (1, {"peak_bytes": 1})):
            kinds = self.kinds()
            kinds[index].metrics.steps[-1].update(change)
            with self.assertRaises(Failed, msg=change):
                models.judge("experts", *kinds, 2e-6, models.NEAR)
        for furthest in (1e-3, float("nan")):
            with self.assertRaises(Failed):
                models.judge("experts", *self.kinds(), furthest, models.NEAR)

    def test_memory_that_grows_beside_the_pool_fails(self):
        constant = metrics({}, {}, {})
        self.assertEqual(rehearsal.beside_pool(constant), [500000000] * 3)
        rehearsal.judge("run", rehearsal.beside_pool(constant))
        with self.assertRaises(Failed):
            rehearsal.judge("run", rehearsal.beside_pool(metrics({}, {"device_total_used_bytes": 535554432})))

    def test_what_slows_a_gpu_down_is_said(self):
        usual = dict(throttling="0x0000000000000001", power_limit_w="700.00", power_default_w="700.00", mig="Disabled", compute_mode="Default")
        self.assertEqual(preflight.warnings(usual), [])
        self.assertEqual(preflight.warnings({name: None for name in preflight.QUERIES}), [])
        for change in (dict(throttling="0x0000000000000024"), dict(power_limit_w="500.00"), dict(mig="Enabled"),
                       dict(compute_mode="Exclusive_Process")):
            self.assertEqual(len(preflight.warnings({**usual, **change})), 1, change)

    def test_findings_of_the_sanitizer_name_kernels(self):
        said = ("========= COMPUTE-SANITIZER\n========= Error: Race reported between Read access at adamw_f32_f32_f32+0x10\n"
                "=========     in block (0,0,0)\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n")
        lines = sanitizer.findings_of(said)
        self.assertEqual(len(lines), 2)
        self.assertTrue(any(sanitizer.names_one_of({"adamw_f32_f32_f32"}, line) for line in lines))
        self.assertFalse(any(sanitizer.names_one_of({"adamw_f32"}, line) for line in lines))
        self.assertTrue(sanitizer.SUMMARY.search(said) and not sanitizer.CLEAN.search(said))

    def test_kernels_are_known_by_their_machine_code(self):
        with tempfile.TemporaryDirectory() as folder:
            binary = pathlib.Path(folder) / "x"
            images = b"\0.text\0.nv.info\0.nv.info.adamw_f32\0.text.adamw_f32\0", b"\0.nv.info.swiglu_bf16\0.nv.shared.x\0"
            binary.write_bytes(b"\x78\xda by chance" + b"code".join(zlib.compress(image, 9) for image in images))
            self.assertEqual(sanitizer.kernel_names(binary), {"adamw_f32", "swiglu_bf16"})

    def test_page_locked_copies_are_reported_where_there_is_a_gpu(self):
        rates = dict(gemm_tflops=1.0, copy_gbps=1.0, upload_gbps=1.0, download_gbps=1.0)
        for device, rows in (({}, 4), (dict(h2d_gbps=50.0, d2h_gbps=51.0, both_ways_gbps=80.0), 7)):
            found = Findings()
            doctor.report(found, device, rates, "bf16")
            self.assertEqual(len(found.tables[0].rows), rows)

    def test_a_shape_is_timed_where_gpu_and_host_have_room(self):
        planned = dict(reserved_bytes=70, device_overhead_bytes=10, host_pinned_bytes=30)
        def obstacle(total=80, available=36, group=None, locked=None):
            return homes.obstacle_to(planned, total, dict(available_bytes=available, group_limit_bytes=group, locked_limit_bytes=locked))
        self.assertIsNone(obstacle())
        self.assertIsNone(obstacle(available=None))
        for short in (dict(total=79), dict(available=35), dict(group=35), dict(locked=35)):
            self.assertIsNotNone(obstacle(**short), short)
        self.assertEqual((homes.share_of_rate(80.0, 100.0), homes.share_of_rate(80.0, None)), (", 80 % of 100.0", ""))

    def test_states_on_the_host_may_cost_three_percent(self):
        homes.judge(homes.STATES_7B, {"forward window, slower": 0.03, "at the end, slower": 0.4, "share of copies' rate": 0.9})
        homes.judge(homes.ON_DISK, {"disk, slower": 0.5})
        for case, figures in ((homes.STATES_7B, {"forward window, slower": 0.031}), (homes.ON_HOST, {"pinned, slower": 0.031}), (homes.STATES_7B, {"share of copies' rate": 0.89})):
            with self.assertRaises(Failed, msg=figures):
                homes.judge(case, figures)

    def test_a_card_that_is_taken_too_late_shows_nothing(self):
        trained = SimpleNamespace(metrics=metrics({}, {}, {}))
        robust.judge(trained, trained, dict(taken_bytes=1, steps_before=2))
        for figures, expected in ((dict(taken_bytes=1, steps_before=3), Skipped), ({}, Skipped), (dict(taken_bytes=0, steps_before=2), Failed)):
            with self.assertRaises(expected, msg=figures):
                robust.judge(trained, trained, figures)

    def test_a_process_is_told_once_and_never_waited_for(self):
        with tempfile.TemporaryDirectory() as folder:
            out, found, said, told = pathlib.Path(folder), Findings(), SimpleNamespace(lines=["ready\n"]), []
            take = robust.Take(SimpleNamespace(stdin=SimpleNamespace(write=told.append, flush=lambda: None)), said, out, found)
            self.assertFalse(take(None))
            (out / "metrics.jsonl").write_text('{"kind":"step"}\n' * 3)
            self.assertEqual(([take(None) for _ in range(2)], told), ([False] * 2, ["go\n"]))
            said.lines.append("4096\n")
            self.assertTrue(take(None))
            self.assertEqual(found.figures, dict(taken_bytes=4096, steps_before=3))

    def test_two_rounds_of_speeds_are_one_mean(self):
        first = dict(tokens_per_s=10.0, step_ms=4.0, sm_mhz=None, watts=1.0, first_loss=12.0)
        self.assertEqual(speed.mean(first, {**first, "tokens_per_s": 20.0, "sm_mhz": 1.0}), {**first, "tokens_per_s": 15.0})

    def test_a_whole_model_is_told_from_two_numbers_of_layers(self):
        some = protocol.Protocol((), 1, 1.0, "", layers=(4, 8), all_layers=32)
        self.assertEqual(protocol.whole(some, [50.0, 90.0]), 90.0 + 24 * 10.0)
        self.assertEqual(protocol.whole(protocol.Protocol((), 1, 1.0, ""), [50.0]), 50.0)

    def test_a_peer_stands_beside_our_fastest_variant(self):
        row = lambda us, **more: dict(dict(kernel="adamw", model="m", shape=[4], us=us, variant=["a"]), **more)
        ours = [row(2.0), row(1.5, variant=["b", "c"], registers=[40, 8]), row(1.0, model="n"), dict(kernel="adamw", model="m", shape=[4], refused="no room")]
        theirs = row(3.0, peer="fused")
        self.assertEqual(kernels.best(ours, theirs), ours[1])
        self.assertEqual(kernels.row(theirs, ours[1])[-1], "2.00")
        self.assertEqual([kernels.row(ours[1], None)[at] for at in (3, 11)], ["trainer, b,c", "40,8"])
        self.assertEqual(kernels.row(ours[3], None)[-1], "no room")
        self.assertEqual(len(kernels.row(theirs, None)), len(kernels.COLUMNS))

    def test_kernels_that_are_not_all_timed_are_open(self):
        for script, expected in (("exit 3", Failed), ("echo '1 cases are left' >&2", OutOfTime), ("sleep 60", OutOfTime), ("true", None)):
            records, ended = kernels.timed(["bash", "-c", f"echo '{{\"us\": 1}}'; {script}"], None, Clock(1.2))
            self.assertEqual(records, [dict(us=1)], script)
            if expected is None:
                kernels.judge(ended)
                continue
            with self.assertRaises(expected, msg=script):
                kernels.judge(ended)

    def test_speeds_of_other_models_do_not_compare(self):
        figures = dict(tokens_per_s=1.0, first_loss=12.1)
        outcomes = {engine: dict(figures) for engine in speed.EVERY}
        speed.judge(outcomes)
        with self.assertRaises(Skipped):
            speed.judge({speed.OURS: figures, speed.EAGER: Failed("no torch")})
        for engine, other, expected in ((speed.EAGER, {**figures, "first_loss": 11.9}, Failed), (speed.OURS, Failed("no"), Failed),
                                        (speed.COMPILED, OutOfTime("late"), OutOfTime)):
            with self.assertRaises(expected, msg=engine):
                speed.judge({**outcomes, engine: other})
        speed.judge({**outcomes, speed.COMPILED: Failed("no")})


class Trainer:
    """A trainer whose runs leave the files that a test sets, chosen by words among the arguments."""
    is_cuda = is_gpu = True

    def __init__(self, folder, gpu=None, header=None, steps=None):
        self.folder, self.of_gpu, self.header, self.steps, self.asked = pathlib.Path(folder), gpu or {}, header, steps, []

    def gpu(self):
        return self.of_gpu

    def file(self, name):
        return self.folder / name

    def trainer(self, *arguments):
        self.asked.append(arguments)
        self.file("algorithms.json").write_text("{}")
        return Finished(["trainer"], 0, '{"problems": 7}', "", 12.0)

    def need_gpu(self, *_):
        pass

    def train_watched(self, *arguments):
        return self.train(*arguments), SimpleNamespace(sm_mhz=1980.0, watts=700.0)

    def train(self, *arguments):
        self.asked.append(arguments)
        count = arguments[arguments.index("--steps") + 1]
        run = metrics(*({"loss": 5.0 - 0.1 * step, **self.steps(arguments, step)} for step in range(count)))
        run.header |= self.header(arguments)
        return SimpleNamespace(metrics=run, plan=PLAN)


def run_section(section, place, case=None):
    found = Findings()
    section.run(place, found, case or next(iter(section.CASES)))
    return found


class Graphs(unittest.TestCase):
    def place(self, folder, on=True, **changes):
        off = lambda arguments: "train.graphs=off" in arguments
        def steps(arguments, step):
            return {"step_ms": 20.0 if off(arguments) else 10.0, **({} if off(arguments) else changes)}
        return Trainer(folder, header=lambda arguments: {"graphs": on and not off(arguments)}, steps=steps)

    def test_the_same_bits_in_less_time_pass(self):
        found = run_section(graphs, self.place("/"))
        self.assertEqual([row[4] for row in found.tables[0].rows], ["100.0 %"])
        self.assertEqual((found.figures["graphs_ms"], found.figures["plain_ms"]), (10.0, 20.0))

    def test_what_a_graph_changes_fails(self):
        for change in (dict(on=False), dict(loss=4.0), dict(peak_bytes=1), dict(h2d_bytes=1), dict(replayed={}), dict(driver_allocations=1)):
            with self.assertRaises(Failed, msg=change):
                run_section(graphs, self.place("/", **change))

    def test_a_record_says_why_there_are_none(self):
        place = self.place("/")
        place.header = lambda arguments: {"graphs": False, "graphs_off": "ranks"}
        with self.assertRaisesRegex(Failed, "no graphs: ranks"):
            run_section(graphs, place)


class Tuning(unittest.TestCase):
    def place(self, folder, tuned_ms=9.0, named="algorithms.json 0123", **change):
        tuned = lambda arguments: "hardware.algorithms=heuristic" not in arguments
        def steps(arguments, step):
            return {"step_ms": tuned_ms, **change} if tuned(arguments) else {"step_ms": 10.0}
        return Trainer(folder, header=lambda arguments: {"algorithms": named if tuned(arguments) else "heuristic"}, steps=steps)

    def test_a_file_that_is_taken_and_pays_passes(self):
        with tempfile.TemporaryDirectory() as folder:
            place = self.place(folder)
            found = run_section(tuning, place)
        self.assertAlmostEqual(found.figures["speed_ratio"], 10 / 9)
        self.assertEqual(found.figures["tune_s"], 12.0)
        # Tuned for the shape that is trained, into the file that is taken.
        tune, *runs = place.asked
        self.assertTrue(set(map(str, tuning.SHAPE)) <= set(map(str, tune)) and all(set(tuning.SHAPE) <= set(run) for run in runs))
        self.assertIn(f"hardware.algorithms={tune[tune.index('--out') + 1]}", runs[1])

    def test_a_file_that_is_not_taken_or_does_harm_fails(self):
        for change in (dict(tuned_ms=10.5), dict(named="heuristic"), dict(loss=9.0), dict(peak_bytes=1)):
            with tempfile.TemporaryDirectory() as folder, self.assertRaises(Failed, msg=change):
                run_section(tuning, self.place(folder, **change))

    def test_bits_that_change_from_run_to_run_fail(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(Failed, "second run"):
            place = self.place(folder)
            steps = place.steps
            place.steps = lambda arguments, step: {**steps(arguments, step), "grad_norm": float(len(place.asked))}
            run_section(tuning, place)


class Operations(unittest.TestCase):
    def test_the_update_is_compared_with_copies(self):
        operation = lambda name, ms, floor: dict(operation=name, ms=ms, bytes_floor_ms=floor)
        profile = dict(operations=[operation("adamw", 2.0, 1.5), operation("matmul", 9.0, 1.0), operation("adamw", 0.5, 0.5)])
        self.assertEqual(operations.update_share(profile), 0.8)
        with self.assertRaises(Failed):
            operations.update_share(dict(operations=profile["operations"][1:2]))


class Planning(unittest.TestCase):
    """What is open, and which command runs it."""

    def run_of(self, device="cuda", **records):
        return dict(device=device, date="2026-11-27", cases={f"s/{name}": record for name, record in records.items()})

    def test_what_passed_with_these_sources_holds(self):
        case, timed = Case("s", "a", 5, ()), Case("s", "a", 5, (), is_speed=True)
        state = lambda record, which=case: results.state(which, [self.run_of(a=record)], {"s/a": "1"})
        self.assertEqual(state(dict(status=PASS, sources="1")), results.HOLDS)
        self.assertEqual([state(record) for record in (dict(status=PASS, sources="0"), dict(status=FAIL, sources="1"))], [results.OPEN_AGAIN] * 2)
        self.assertEqual([state(dict(status=SKIPPED)), results.state(case, [], {"s/a": "1"})], [results.NEVER] * 2)
        self.assertEqual([state(dict(status=PASS, sources=sources), timed) for sources in "10"], [results.HOLDS, results.SPEED])

    def test_the_newest_result_counts(self):
        old, new = self.run_of(a=dict(status=PASS)), self.run_of(a=dict(status=FAIL))
        self.assertEqual(results.last([old, new], "s/a")[0]["status"], FAIL)
        self.assertEqual(results.last([old, self.run_of(a=dict(status=SKIPPED))], "s/a")[0]["status"], PASS)
        self.assertIsNone(results.last([old], "s/b"))

    def test_a_result_is_named_after_day_card_commit_and_command(self):
        self.assertEqual(results.file_name("2026-11-28 09:15 UTC", "NVIDIA H100 80GB HBM3", "18d8fd7310a0", "first"), "2026-11-28-h100-80gb-hbm3-18d8fd73-first-0915.json")

    def test_runs_without_a_gpu_show_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            for device in ("cpu", "cuda"):
                (pathlib.Path(folder) / f"{device}.json").write_text(json.dumps(self.run_of(device)))
            self.assertEqual([run["file"] for run in results.load(folder)], ["cuda.json"])

    def test_each_command_has_what_changed_what_never_ran_and_speed(self):
        found = {kind: [Case(kind, str(number), 5, ()) for number in range(120)] for kind in schedule.KINDS}
        plan = schedule.commands(found)
        for command in ("first", "second"):
            sections = [case.section for case in plan[command]]
            self.assertEqual(sections, sorted(sections, key=schedule.KINDS.index))
            self.assertEqual(set(sections), set(schedule.SHARES[command]))
            self.assertLessEqual(sum(case.seconds for case in plan[command]), schedule.SECONDS - schedule.START_SECONDS)
        everything = [case for planned in plan.values() for case in planned]
        self.assertEqual(sorted(everything, key=str), sorted((case for waiting in found.values() for case in waiting), key=str))

    def test_what_one_kind_leaves_goes_to_the_others(self):
        found = {kind: [] for kind in schedule.KINDS} | {results.SPEED: [Case("s", str(number), 50, (), True) for number in range(9)]}
        self.assertEqual([len(planned) for planned in schedule.commands(found).values()], [6, 3, 0])

    def test_what_is_late_comes_after_times_and_headlines_before_others(self):
        late, failed = Case("s", "late", 5, (), is_late=True), dict(status=FAIL)
        taken, fresh, headline = (Case(section, name, 5, (), is_speed=True) for section, name in (("s", "taken"), ("s", "fresh"), ("graphs", "small")))
        every = [late, taken, fresh, headline]
        runs = [self.run_of(late=failed, taken=failed)]
        plan = schedule.commands(schedule.opened(every, runs, {case.full: "1" for case in every}))
        self.assertEqual(plan["first"], [headline, fresh, taken, late])
        self.assertEqual(schedule.opened([late], [], {"s/late": "1"})[results.NEVER], [late])

    def test_all_runs_what_holds_too(self):
        case, runs = Case("s", "a", 5, ()), [self.run_of(a=dict(status=PASS, sources="1"))]
        self.assertEqual([schedule.opened([case], runs, {"s/a": "1"}, everything)[results.OPEN_AGAIN] for everything in (False, True)], [[], [case]])


class Sources(unittest.TestCase):
    def test_a_hash_follows_contents_and_headers(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "kernels").mkdir()
            write = lambda name, text: (root / "kernels" / name).write_text(text)
            write("a.cu", '#include "b.cuh"\n')
            write("b.cuh", '#include "c.cuh"\n')
            write("c.cuh", "1")
            write("d.cu", "1")
            git = lambda *words: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=root, check=True, capture_output=True)
            git("init", "-q")
            git("add", ".")
            git("commit", "-qm", "a")
            patterns = ("kernels/a.cu", "kernels/missing.cu")
            self.assertEqual(Tree(root).files(patterns), ["kernels/a.cu", "kernels/b.cuh", "kernels/c.cuh"])
            before = Tree(root).hash(patterns)
            self.assertEqual(Tree(root, "HEAD").hash(patterns), before)
            write("d.cu", "2")
            self.assertEqual(Tree(root).hash(patterns), before)
            write("c.cuh", "2")
            self.assertNotEqual(Tree(root).hash(patterns), before)
            self.assertEqual(Tree(root, "HEAD").hash(patterns), before)

    def test_every_case_depends_on_files_that_exist_and_has_a_bound(self):
        tree, every = Tree(ROOT), cases()
        for case in every:
            self.assertTrue(case.sources and 3 <= case.seconds <= 100, case.full)
        patterns = {pattern for case in every for pattern in case.sources}
        self.assertEqual([pattern for pattern in sorted(patterns) if not tree.files((pattern,))], [])

    def test_headlines_are_times_and_late_sections_exist(self):
        times = {name for case in cases() if case.is_speed for name in (case.section, case.full)}
        self.assertEqual((set(HEADLINES) - times, set(LATE) - set(SECTIONS)), (set(), set()))

    def test_the_page_is_what_the_results_say(self):
        said = subprocess.run([sys.executable, "-B", ROOT / "scripts" / "gpu" / "status", "--check"], capture_output=True, text=True)
        self.assertEqual(said.returncode, 0, said.stderr)

    def test_results_are_of_cases_that_exist(self):
        known = {case.full for case in cases()} | {f"{section}/machine" for section in ALWAYS}
        for run in results.load(ROOT / "benches" / "results" / "gpu"):
            self.assertEqual({full for full in run["cases"] if not full.startswith("hand/")} - known, set(), run["file"])


class Ending(unittest.TestCase):
    def test_only_what_was_checked_passes(self):
        names = ("doctor/machine", "modes", "speed")
        outcomes = lambda statuses: [Outcome(name, status, "", 0, Findings()) for name, status in zip(names, statuses)]
        for statuses, verdict in (((PASS, PASS), "passed"), ((PASS,), "passed"), ((PASS, PASS, SKIPPED), "passed, without speed"),
                                  ((PASS, NO_TIME), "incomplete: no time for 1 of 2"), ((PASS, NO_TIME, FAIL), "failed: speed"),
                                  ((PASS, SKIPPED), "nothing was checked"), ((), "nothing was checked")):
            self.assertEqual(report.verdict(outcomes(statuses)), verdict)
            self.assertEqual(report.exit_code(outcomes(statuses)) == 0, verdict.startswith("passed"))

    def test_tables_of_one_title_are_one(self):
        outcomes = [Outcome(f"s/{name}", PASS, "", 0, Findings()) for name in "ab"]
        for outcome in outcomes:
            outcome.findings.table("Times", "case", "ms").append([outcome.name, None])
        self.assertEqual(report.markdown(dict(gpu="GPU"), outcomes).count("## Times\n\n| case | ms |\n|---|---|\n| s/a | - |\n| s/b | - |\n"), 1)

    def test_a_command_is_stopped_with_what_it_started(self):
        # The clock ends when the command has said that it has begun, however long that takes.
        clock = Clock(60)
        with self.assertRaises(OutOfTime) as ended:
            run(["bash", "-c", "sleep 60 & echo begun; sleep 60"], clock, each_line=lambda _: setattr(clock, "end", 0), meanwhile=lambda _: False)
        self.assertEqual(ended.exception.stdout, "begun\n")

    def test_a_command_does_not_outlive_an_error_of_who_watches_it(self):
        started = []
        def fail(process):
            started.append(process)
            raise ValueError("why")
        with self.assertRaisesRegex(ValueError, "why"):
            run(["sleep", "60"], Clock(60), meanwhile=fail)
        self.assertEqual(started[0].returncode, -signal.SIGKILL)

    def test_commands_are_listed_with_what_they_printed(self):
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(CommandList, "path", pathlib.Path(folder) / "commands.jsonl"):
            run(["bash", "-c", "echo well"], Clock(6))
            run(["bash", "-c", "echo out; echo why >&2; exit 3"], Clock(6))
            listed = [json.loads(line) for line in CommandList.path.read_text().splitlines()]
        self.assertEqual([(entry["code"], entry.get("stdout"), entry["stderr"]) for entry in listed], [(0, None, ""), (3, "out\n", "why\n")])

    def test_what_is_stopped_is_out_of_time_and_nothing_follows(self):
        # In a process of its own, since a stopped one starts no commands.
        code = ("import threading, sys; from verification.commands import Clock, run, stop; from verification.outcome import OutOfTime\n"
                "threading.Timer(0.3, stop, ['enough']).start()\n"
                "for command in (['sleep', '60'], ['touch', sys.argv[1]]):\n"
                "    try: run(command, Clock(60))\n"
                "    except OutOfTime as ended: print(ended)\n")
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "made"
            finished = run([sys.executable, "-B", "-c", code, file], Clock(60), folder=pathlib.Path(__file__).resolve().parent.parent)
            self.assertEqual([line.split(": ")[-1] for line in finished.stdout.splitlines()], ["enough"] * 2, finished)
            self.assertFalse(file.exists())

    def test_a_panic_is_told_with_its_message(self):
        finished = Finished(["x"], 101, "", "\nthread 'a' panicked at b.rs:1:2:\nno GPU\nnote: run with more\n", 0.0)
        self.assertIn("no GPU", finished.complaint())


    def test_the_list_of_commands_stops_growing(self):
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.object(CommandList, "path", pathlib.Path(folder) / "commands.jsonl"), \
                unittest.mock.patch("verification.commands.LIST_BYTES_MAX", 10):
            for _ in range(3):
                CommandList.add(["x"], 0, 1.0, "", "")
            self.assertEqual(len(CommandList.path.read_text().splitlines()), 1)


# A trainer that leaves behind what `preflight`, `doctor` and `states` look at; where there is a file `slow`, a run never ends.
FAKE_TRAINER = f"""#!{sys.executable}
import json, pathlib, sys, time
words = sys.argv[1:]
bundle = pathlib.Path(__file__).parent
if words[0] == "doctor":
    rates = dict(gemm_tflops=1.0, copy_gbps=1.0, upload_gbps=1.0, download_gbps=1.0)
    print(json.dumps(dict(host=dict(**rates, f32=rates))))
elif words[0] == "train":
    while (bundle / "slow").exists() and "--master" in words:
        time.sleep(0.02)
    out = pathlib.Path(words[words.index("--out") + 1])
    out.mkdir()
    step = dict(kind="step", loss=5.0, grad_norm=1.0, finite=True)
    records = [dict(kind="run", device="cpu"), step, dict(kind="end", reason="done")]
    (out / "metrics.jsonl").write_text("\\n".join(map(json.dumps, records)))
else:
    sys.exit("error: this trainer cannot do that")
"""


class Running(unittest.TestCase):
    """The script itself, with scripts in place of the binaries."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bundle = pathlib.Path(folder.name)
        scripts = pathlib.Path(__file__).resolve().parent.parent
        shutil.copy2(scripts / "verify", self.bundle)
        shutil.copytree(scripts / "verification", self.bundle / "verification", ignore=shutil.ignore_patterns("__pycache__"))
        (self.bundle / "results").mkdir()
        self.manifest()
        self.binary("trainer", FAKE_TRAINER)

    def binary(self, name, text):
        (self.bundle / name).write_text(text)
        (self.bundle / name).chmod(0o755)

    def manifest(self, **changes):
        facts = dict(commit="abcdef012345", machine=platform.machine(), glibc_needed="2.2", version="0.1.0", dirty=False, files={},
                     sources={case.full: "1" for case in cases()})
        (self.bundle / "manifest.json").write_text(json.dumps({**facts, **changes}))

    def start(self, *words):
        command = [sys.executable, "-B", "verify", "--device", "cpu", "--out", "out", *words]
        return subprocess.Popen(command, cwd=self.bundle, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self, *words):
        process = self.start(*words)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    def outcomes(self):
        """Each case of the report with how it ended, and why."""
        text = (self.bundle / "out" / "verification.json").read_text()
        return {case["name"]: (case["status"], case["reason"]) for case in json.loads(text)["cases"]}

    def result(self):
        """The file that is committed."""
        path, = (self.bundle / "out").glob("*-cpu-no-gpu-abcdef01-*.json")
        self.assertEqual(path.read_text(), (self.bundle / "results" / path.name).read_text())
        return json.loads(path.read_text())

    def cut_off(self, number):
        """Ends a run of three cases while the second is under way."""
        (self.bundle / "slow").touch()
        process = self.start("kernels/adamw", "states", "tuning")
        end = time.monotonic() + 60
        while not (self.bundle / "out" / "verification.json").exists() or "under way" not in self.outcomes().get("states/every form", ("", ""))[1]:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
        (self.bundle / "slow").unlink()
        return process.returncode, said

    def test_a_run_that_is_stopped_leaves_what_it_has(self):
        code, said = self.cut_off(signal.SIGTERM)
        self.assertEqual(code, 1, said)
        outcomes = self.outcomes()
        self.assertEqual([outcomes[name][0] for name in ("preflight/machine", "doctor/machine", "kernels/adamw", "states/every form", "tuning/Qwen2.5-0.5B")],
                         [PASS, PASS, SKIPPED, NO_TIME, NO_TIME], said)
        self.assertIn("SIGTERM", outcomes["states/every form"][1])
        self.assertEqual(set(self.result()["cases"]), {"preflight/machine", "doctor/machine", "kernels/adamw"})
        read = (self.bundle / "out" / "verification.md").read_text()
        self.assertTrue("incomplete" in read and "| preflight/machine | pass |" in read and "| uploads | 1.0 GB/s |" in read)

    def test_a_run_that_is_killed_leaves_what_it_has(self):
        self.cut_off(signal.SIGKILL)
        self.assertEqual(self.outcomes()["states/every form"], (NO_TIME, "it was under way when this was written"))
        self.assertEqual({name: record["status"] for name, record in self.result()["cases"].items()},
                         {"preflight/machine": PASS, "doctor/machine": PASS, "kernels/adamw": SKIPPED})

    def test_a_test_program_that_is_killed_leaves_the_tests_that_have_ended(self):
        self.binary("conformance", f"#!{sys.executable}\nimport sys, time\nif '--list' in sys.argv: sys.exit(print('norm: test\\nfp8: test'))\n"
                                   "print('test norm ... ok', flush=True)\ntime.sleep(60)\n")
        process = self.start("conformance/norm", "conformance/fp8")
        end = time.monotonic() + 60
        while "conformance/norm" not in (self.outcomes() if (self.bundle / "out" / "verification.json").exists() else {}) or self.outcomes()["conformance/norm"][0] != PASS:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        self.assertEqual([self.outcomes()[f"conformance/{name}"][0] for name in ("norm", "fp8")], [PASS, NO_TIME])

    def test_a_test_program_that_is_not_there_fails_its_cases(self):
        code, said = self.finish("conformance/norm")
        self.assertEqual(code, 1, said)
        self.assertEqual(self.outcomes()["conformance/norm"][0], FAIL)
        self.assertIn("FileNotFoundError", said)

    def test_worst_errors_stand_beside_the_last_case_and_seconds_are_a_cases_own(self):
        self.binary("conformance", f"#!{sys.executable}\nimport sys, time\nif '--list' in sys.argv: sys.exit(print('norm: test\\nfp8: test'))\n"
                                   "time.sleep(0.6)\nprint('test norm ... emulation for F32: out: 12.5 % of the allowed error\\ntest norm ... ok', flush=True)\n"
                                   "print('test fp8 ... ok', flush=True)\n")
        code, said = self.finish("conformance/norm", "conformance/fp8")
        self.assertEqual((code, said.count("conformance/fp8")), (0, 1), said)
        read = (self.bundle / "out" / "verification.md").read_text()
        self.assertIn("| out | f32 | emulation | 12.5 |", read)
        self.assertGreaterEqual(self.result()["cases"]["conformance/norm"]["seconds"], 0.6)
        self.assertLess(self.result()["cases"]["conformance/fp8"]["seconds"], 0.6)

    def test_what_preflight_finds_keeps_the_rest_from_being_tried(self):
        self.binary("trainer", FAKE_TRAINER.replace('"train"', '"nothing"'))
        code, said = self.finish("limit/none")
        self.assertEqual((code, [status for status, _ in self.outcomes().values()]), (1, [FAIL, NO_TIME, NO_TIME]), said)
        code, said = self.finish("limit/none", "--regardless")
        self.assertEqual([status for status, _ in self.outcomes().values()], [FAIL, PASS, FAIL], said)

    def test_a_case_is_not_begun_without_half_of_its_time(self):
        code, said = self.finish("limit/none", "--budget-s", "3")
        self.assertTrue(all(status == NO_TIME and ("not begun" in why) for status, why in self.outcomes().values()), said)

    def test_first_runs_what_is_open_and_second_the_rest(self):
        passed = dict(status=PASS, sources="1")
        held = {case.full: passed for case in cases() if case.full not in ("kernels/adamw", "tuning/Qwen2.5-0.5B")}
        (self.bundle / "results" / "a.json").write_text(json.dumps(dict(device="cuda", date="2026-11-27", cases=held)))
        self.manifest(files={"results/a.json": dict(sha256=hashlib.sha256((self.bundle / "results" / "a.json").read_bytes()).hexdigest())})
        code, said = self.finish("list")
        self.assertEqual((code, said.splitlines()[:3]), (0, ["first: 2 cases, 52 s at most", "    7 s  speed      kernels/adamw", "   45 s  speed      tuning/Qwen2.5-0.5B"]))
        code, said = self.finish("first")
        self.assertEqual(list(self.outcomes()), ["preflight/machine", "doctor/machine", "kernels/adamw", "tuning/Qwen2.5-0.5B"], said)
        # Nothing that runs without a GPU counts.
        self.assertIn("## Open after this run\n\n```text\nfirst: 2 cases", (self.bundle / "out" / "verification.md").read_text())

    def test_a_file_that_changed_on_the_way_is_refused(self):
        self.manifest(files={"verify": dict(sha256="0")})
        code, said = self.finish("limit")
        self.assertEqual((code, "verify is not the file" in said), (1, True), said)

    def test_a_command_stands_alone(self):
        code, said = self.finish("first", "second")
        self.assertEqual((code, "stand alone" in said), (2, True), said)

    def test_peers_do_without_a_wheel_that_does_not_install(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.move(self.bundle / "trainer", folder)
            build.pack(pathlib.Path(folder), self.bundle / "packed.tar.xz")
        (self.bundle / "wheels").mkdir()
        (self.bundle / "wheels" / "broken-1-py3-none-any.whl").write_text("no wheel")
        self.manifest(files={"packed.tar.xz": dict(sha256=hashlib.sha256((self.bundle / "packed.tar.xz").read_bytes()).hexdigest())})
        for _ in range(2):
            code, said = self.finish("preflight")
            self.assertEqual(code, 0, said)
            self.assertIn("- wheels: not installed: ", (self.bundle / "out" / "verification.md").read_text())
        self.assertFalse((self.bundle / "unpacked" / "site").exists())

    def test_what_is_packed_is_unpacked_once(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.move(self.bundle / "trainer", folder)
            build.pack(pathlib.Path(folder), self.bundle / "packed.tar.xz")
        self.manifest(files={"packed.tar.xz": dict(sha256=hashlib.sha256((self.bundle / "packed.tar.xz").read_bytes()).hexdigest())})
        for _ in range(2):
            code, said = self.finish("preflight")
            self.assertEqual(code, 0, said)
            mark = (self.bundle / "unpacked" / "unpacked-from").stat().st_mtime_ns
        self.assertEqual(mark, (self.bundle / "unpacked" / "unpacked-from").stat().st_mtime_ns)


# It takes PyTorch: eval "$(benches/peers/setup_torch)".
if "PEER_PYTHON" in os.environ:
    class Peers(unittest.TestCase):
        def test_kernels_of_torch_are_timed_as_ours_are(self):
            command = [os.environ["PEER_PYTHON"], "-B", ROOT / "benches" / "peers" / "torch_kernels.py", "--device", "cpu", "--tiny"]
            said = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LD_LIBRARY_PATH": os.environ.get("PEER_LD", "")})
            rows = [json.loads(line) for line in said.stdout.splitlines()]
            self.assertEqual({row["kernel"] for row in rows}, {"flash_attention", "flash_attention_backward", "grouped_matmul", "grouped_matmul.data", "grouped_gradient", "matmul", "scaled_mm", "scaled_mm.fast",
                                                               "adamw", "cross_entropy", "rms_norm", "rms_norm_backward"}, said.stderr)
            self.assertTrue(all(row["us"] > 0 and len(kernels.row(row, None)) == len(kernels.COLUMNS) for row in rows))


class Building(unittest.TestCase):
    def test_what_weighs_is_said(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, size in (("small", 10), ("large", 3_000_000)):
                (pathlib.Path(folder) / name).write_bytes(b"x" * size)
            self.assertEqual(build.sizes(pathlib.Path(folder)), "large 3.0 MB, small 0.0 MB")

    def test_all_that_it_copies_is_there(self):
        self.assertEqual([source for source, _ in build.PACKED + build.BESIDE if not (ROOT / source).exists()], [])


if __name__ == "__main__":
    unittest.main()
