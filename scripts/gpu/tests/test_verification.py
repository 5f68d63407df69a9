"""Tests how the sections judge the files of runs; no binary and no GPU is needed.

  python3 -m unittest discover -s scripts/gpu/tests
"""
import copy
import json
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

from verification import libraries, report, tensors
from verification.commands import Clock, CommandList, Finished, run
from verification.metrics import Metrics
from verification.outcome import FAIL, NO_TIME, PASS, SKIPPED, Failed, Findings, Outcome, OutOfTime, Skipped
from verification.sections import SECTIONS, conformance, cudnn, doctor, graphs, models, modes, offload, operations, plan, preflight, rehearsal, sanitizer, speed, tuning

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

    def test_results_and_errors_of_the_conformance_suite(self):
        said = ("running 2 tests\ntest refusals::any ... ok\ncpu for F32: out: 80.0 % of the allowed error\n"
                "test norm ... NVIDIA H200 for BF16: dq of it: 12.5 % of the allowed error\ntest norm ... FAILED\n")
        self.assertEqual(conformance.results(said), (["refusals::any"], ["norm"]))
        self.assertEqual(conformance.shares(said), {("NVIDIA H200", "dq of it", "BF16"): 12.5})

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


    def test_libraries_of_packages_come_before_the_systems(self):
        with tempfile.TemporaryDirectory() as root:
            folder = pathlib.Path(root) / "cudnn" / "lib"
            folder.mkdir(parents=True)
            self.assertNotIn(folder, libraries.folders_with("libcudnn.so.9", [root]))
            (folder / "libcudnn.so.9").touch()
            self.assertEqual(libraries.folders_with("libcudnn.so.9", [root])[0], folder)
            with unittest.mock.patch.dict("os.environ", LD_LIBRARY_PATH=f":/nowhere:{folder}"):
                self.assertEqual(libraries.folders_with("libcudnn.so.9", [])[0], folder)


class Judging(unittest.TestCase):
    def test_a_plan_and_a_constant_pass(self):
        figures = plan.compare(PLAN, metrics({"driver_allocations": 5}, {}, {}), True)
        plan.judge("run", figures)
        self.assertEqual((figures["difference_bytes"], figures["overhead_bytes"]), (512, 500000000))

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

    def test_a_shape_is_timed_where_gpu_host_and_clock_have_room(self):
        resident, offloaded = dict(reserved_bytes=70, device_overhead_bytes=10), dict(host_pinned_bytes=30)
        def obstacle(total=80, available=36, group=None, locked=None, left=100.0):
            host = dict(available_bytes=available, group_limit_bytes=group, locked_limit_bytes=locked)
            place = SimpleNamespace(gpu=lambda: dict(memory=dict(total=total)), doctor=dict(host=host), clock=SimpleNamespace(left=lambda: left))
            return offload.obstacle_to(place, resident, offloaded, 60)
        self.assertIsNone(obstacle())
        self.assertIsNone(obstacle(available=None))
        for short in (dict(total=79), dict(available=35), dict(group=35), dict(locked=35), dict(left=59.0)):
            self.assertIsNotNone(obstacle(**short), short)

    def test_offloaded_states_are_timed_beside_resident_ones(self):
        def trained(step_ms, optimizer_ms):
            run = metrics({"step_ms": 9e9}, *[{"step_ms": step_ms, "phase_ms": {"optimizer": optimizer_ms}}] * 2)
            return SimpleNamespace(metrics=run, plan=dict(offload=dict(optimizer_bytes=4_000_000_000, exposed_ms=1.0, both_ways_gbps=75.0)))
        figures = offload.figures_of(trained(1000.0, 20.0), trained(1020.0, 30.0), trained(1200.0, 100.0))
        self.assertAlmostEqual(figures["slower"], 0.02)
        self.assertEqual((figures["measured_both_ways_gbps"], figures["optimizer_ms"]), (80.0, 20.0))
        self.assertEqual(offload.share_of_rate(80.0, 100.0), ", 80 % of 100.0")

    def test_speeds_of_other_models_do_not_compare(self):
        case = speed.ON_CUDA[1]
        figures = dict(tokens_per_s=1.0, first_loss=12.1)
        outcomes = {speed.key(case, engine): dict(figures) for engine in case.engines}
        essential = [(case, engine) for engine in case.engines]
        speed.judge(essential, outcomes, "2.11")
        with self.assertRaises(Skipped):
            speed.judge(essential, outcomes, None)
        for engine, other, expected in ((speed.EAGER, {**figures, "first_loss": 11.9}, Failed), (speed.OURS, Failed("no"), Failed),
                                        (speed.COMPILED, Failed("no"), Failed), (speed.COMPILED, OutOfTime("late"), OutOfTime)):
            with self.assertRaises(expected, msg=engine):
                speed.judge(essential, {**outcomes, speed.key(case, engine): other}, "2.11")


class Trainer:
    """A trainer whose runs leave the files that a test sets, chosen by words among the arguments."""
    is_cuda = True

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

    def train(self, *arguments):
        self.asked.append(arguments)
        count = arguments[arguments.index("--steps") + 1]
        run = metrics(*({"loss": 5.0 - 0.1 * step, **self.steps(arguments, step)} for step in range(count)))
        run.header |= self.header(arguments)
        return SimpleNamespace(metrics=run, plan=PLAN)


def run_section(section, place):
    found = Findings()
    section.run(place, found)
    return found


class Graphs(unittest.TestCase):
    def place(self, folder, on=True, **changes):
        off = lambda arguments: "train.graphs=off" in arguments
        def steps(arguments, step):
            return {"step_ms": 20.0 if off(arguments) else 10.0, **({} if off(arguments) else changes)}
        return Trainer(folder, header=lambda arguments: {"graphs": on and not off(arguments)}, steps=steps)

    def test_the_same_bits_in_less_time_pass(self):
        found = run_section(graphs, self.place("/"))
        self.assertEqual([(row[4], row[5]) for row in found.tables[0].rows], [("100.0 %", "yes")] * len(graphs.CASES))

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
        self.assertEqual(found.figures["tune"]["said"], {"problems": 7})
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


class Cudnn(unittest.TestCase):
    def setUp(self):
        # No library is loaded here.
        version_of, cudnn.version_of = cudnn.version_of, lambda place: place.version
        self.addCleanup(setattr, cudnn, "version_of", version_of)

    def place(self, backend="cudnn", version="9.28.0", replays=True, **changes):
        words = lambda arguments: ("cudnn" in arguments, "core_attn" in arguments)
        def header(arguments):
            return {"attention": backend, "cudnn_version": version} if words(arguments)[0] else {"attention": "flash"}
        def steps(arguments, step):
            cudnn_, recomputed = words(arguments)
            replayed = {"core_attn": 8} if recomputed and replays else {}
            return {"step_ms": 8.0, "loss": 5.001 - 0.1 * step, "replayed": replayed, **changes} if cudnn_ else {"step_ms": 10.0, "replayed": {}}
        place = Trainer("/", dict(capability="9.0"), header, steps)
        place.version = 92800
        return place

    def test_planned_near_and_repeatable_passes(self):
        found = run_section(cudnn, self.place())
        self.assertEqual([(row[1], row[5]) for row in found.tables[0].rows], [("9.28.0", "25.0 %")] * len(cudnn.CASES))

    def test_another_backend_or_another_loss_fails(self):
        for change in (dict(backend="flash"), dict(version=None), dict(replays=False), dict(loss=5.5), dict(peak_bytes=1), dict(driver_allocations=1)):
            with self.assertRaises(Failed, msg=change):
                run_section(cudnn, self.place(**change))

    def test_a_library_that_is_there_and_not_used_fails(self):
        place = self.place()
        place.of_gpu["cudnn_missing"] = "it does not compute what our own does"
        with self.assertRaisesRegex(Failed, "92800 is here, and not used: it does not compute"):
            run_section(cudnn, place)

    def test_our_own_bits_are_not_cudnns(self):
        place = self.place()
        steps = place.steps
        place.steps = lambda arguments, step: {**steps(arguments, step), "loss": 5.0 - 0.1 * step}
        with self.assertRaisesRegex(Failed, "was not used"):
            run_section(cudnn, place)

    def test_without_the_library_it_is_skipped_and_says_so(self):
        cudnn.skip_unless_fit(92500, None)
        for version, capability, said in ((None, "9.0", "pip install"), (92100, "9.0", "92100 is too old"), (92800, "8.9", "8.9")):
            with self.assertRaisesRegex(Skipped, said):
                cudnn.skip_unless_fit(version, capability)
        place = self.place()
        place.version = None
        with self.assertRaises(Skipped):
            run_section(cudnn, place)


class Operations(unittest.TestCase):
    def test_the_update_is_compared_with_copies(self):
        operation = lambda name, ms, floor: dict(operation=name, ms=ms, bytes_floor_ms=floor)
        profile = dict(operations=[operation("adamw", 2.0, 1.5), operation("matmul", 9.0, 1.0), operation("adamw", 0.5, 0.5)])
        self.assertEqual(operations.update_share(profile), 0.8)
        with self.assertRaises(Failed):
            operations.update_share(dict(operations=profile["operations"][1:2]))


class Ending(unittest.TestCase):
    def test_only_what_was_checked_passes(self):
        names = ("doctor", "modes", "speed")
        outcomes = lambda statuses: [Outcome(name, "", status, "", 0, Findings()) for name, status in zip(names, statuses)]
        for statuses, verdict in (((PASS, PASS), "passed"), ((PASS,), "passed"), ((PASS, PASS, SKIPPED), "passed, without speed"),
                                  ((PASS, NO_TIME), "incomplete"), ((PASS, NO_TIME, FAIL), "failed"),
                                  ((PASS, SKIPPED), "nothing was checked"), ((), "nothing was checked")):
            self.assertEqual(report.verdict(outcomes(statuses)), verdict)
            self.assertEqual(report.exit_code(outcomes(statuses)) == 0, verdict.startswith("passed"))

    def test_a_command_is_stopped_with_what_it_started(self):
        with self.assertRaises(OutOfTime) as ended:
            run(["bash", "-c", "echo begun; sleep 60 & sleep 60"], Clock(6))
        self.assertEqual(ended.exception.stdout, "begun\n")

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


# A trainer that leaves behind what `preflight` and `doctor` look at; its doctor takes long where there is a file `slow`.
FAKE_TRAINER = f"""#!{sys.executable}
import json, pathlib, sys, time
words = sys.argv[1:]
if words[0] == "doctor":
    while (pathlib.Path(__file__).parent / "slow").exists():
        time.sleep(0.05)
    rates = dict(gemm_tflops=1.0, copy_gbps=1.0, upload_gbps=1.0, download_gbps=1.0)
    print(json.dumps(dict(host=dict(**rates, f32=rates))))
elif words[0] == "train":
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
        for name in ("trainer", "conformance", "cuda_device"):
            (self.bundle / name).write_text(FAKE_TRAINER)
            (self.bundle / name).chmod(0o755)
        self.manifest(commit="abc")

    def manifest(self, **changes):
        facts = dict(machine=platform.machine(), glibc_needed="2.2", version="0.1.0", dirty=False, files={})
        (self.bundle / "manifest.json").write_text(json.dumps({**facts, **changes}))

    def start(self, *words, out=("--out", "out")):
        command = [sys.executable, "-B", "verify", "--device", "cpu", *out, *words]
        return subprocess.Popen(command, cwd=self.bundle, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def results(self):
        """Each section of the report with how it ended, and why."""
        text = (self.bundle / "out" / "verification.json").read_text()
        return {section["name"]: (section["status"], section["reason"]) for section in json.loads(text)["sections"]}

    def wait_for(self, holds):
        end = time.monotonic() + 60
        while not holds():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def cut_off(self, number):
        """Ends a run of all sections while `doctor` is under way."""
        (self.bundle / "slow").touch()
        process = self.start()
        under_way = lambda: (self.bundle / "out" / "verification.json").exists() and "under way" in self.results()["doctor"][1]
        self.wait_for(under_way)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
        (self.bundle / "slow").unlink()
        return process.returncode, said

    def test_a_run_that_is_cut_off_leaves_a_report_and_is_gone_on_with(self):
        code, said = self.cut_off(signal.SIGTERM)
        self.assertEqual(code, 1, said)
        results = self.results()
        self.assertEqual(list(results), list(SECTIONS))
        self.assertEqual((results["preflight"][0], results["doctor"][0], results["plan"]), (PASS, NO_TIME, (NO_TIME, "it was not reached")))
        self.assertIn("SIGTERM", results["doctor"][1])
        read = (self.bundle / "out" / "verification.md").read_text()
        self.assertTrue("incomplete" in read and "| preflight | pass |" in read)

        # One section is named; the others stay as they are.
        process = self.start("doctor", "--continue", "out")
        said, _ = process.communicate(timeout=60)
        again = self.results()
        self.assertEqual((again["preflight"][0], again["doctor"][0], again["plan"]), (PASS, PASS, (NO_TIME, "it was not reached")), said)
        self.assertIn("| uploads | 1.0 GB/s |", (self.bundle / "out" / "verification.md").read_text())

        # Sections with a result do not run again, except preflight, which takes seconds; their tables are kept, in the
        # same folder.
        process = self.start("--continue", "out", out=())
        said, _ = process.communicate(timeout=60)
        self.assertEqual([line.split()[0] for line in said.splitlines()[:2]], ["preflight", "references"], said)
        self.assertFalse((self.bundle / "verification" / "verification.md").exists())
        self.assertIn("| uploads | 1.0 GB/s |", (self.bundle / "out" / "verification.md").read_text())

    def test_a_run_that_is_killed_leaves_what_it_had_done(self):
        self.cut_off(signal.SIGKILL)
        results = self.results()
        self.assertEqual((results["preflight"][0], results["doctor"]), (PASS, (NO_TIME, "it was under way when this was written")))

    def test_a_report_of_other_binaries_is_not_gone_on_with(self):
        self.cut_off(signal.SIGTERM)
        self.manifest(commit="abc", files={"manifest.json": dict(bytes=1, sha256="")})
        process = self.start("--continue", "out")
        said, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1)
        self.assertIn("of other files", said)

    def test_what_preflight_keeps_from_being_tried_is_tried_when_the_run_goes_on(self):
        trainer = self.bundle / "trainer"
        trainer.write_text(FAKE_TRAINER.replace('"train"', '"nothing"'))
        self.start("doctor").communicate(timeout=60)
        results = self.results()
        self.assertEqual((results["preflight"][0], results["doctor"]), (FAIL, (NO_TIME, "not tried after what preflight found")))
        trainer.write_text(FAKE_TRAINER)
        self.start("doctor", "--continue", "out").communicate(timeout=60)
        self.assertEqual([status for status, _ in self.results().values()], [PASS, PASS])

    def test_a_section_is_not_begun_without_half_of_its_time(self):
        process = self.start("--budget-s", "12")
        said, _ = process.communicate(timeout=60)
        results = self.results()
        self.assertTrue(all(status == NO_TIME and "not begun" in why for status, why in results.values()), said)

    def test_everything_has_a_bound_and_all_of_it_takes_25_minutes(self):
        self.assertTrue(all(section.SECONDS >= 30 and section.CHECKS for section in SECTIONS.values()))
        self.assertLessEqual(sum(section.SECONDS for section in SECTIONS.values()), 1500)


if __name__ == "__main__":
    unittest.main()
