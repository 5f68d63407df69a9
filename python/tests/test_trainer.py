"""Tests of the installed wheel: the package calls the program, and what that writes is as its schemas say."""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import trainer
from jsonschema import Draft202012Validator, ValidationError

SMALL = ["--config=tiny", "--steps=2", "--micro-batch=2", "--seq=32", "--device=cpu"]


def validate(name, document):
    schema = trainer.schema(name)
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(document)


class Package(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def train(self, *flags, out, settings=SMALL, exit_code=0):
        """Trains into a folder; returns the records of its metrics."""
        folder = self.folder / out
        words = [*settings, *flags, "--quiet", f"--out={folder}"]
        done = subprocess.run([trainer.binary(), *words], capture_output=True, text=True, cwd=self.folder)
        self.assertEqual(done.returncode, exit_code, done.stderr)
        files = [*folder.glob("metrics.jsonl"), *folder.glob("ranks/*/metrics.jsonl")]
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def read(self, path):
        return json.loads((self.folder / path).read_text())

    def test_plans_are_as_their_schema_says(self):
        for flags in [
            dict(device="cpu"),
            dict(device="cuda", offload_optimizer="pinned", device_memory="640.5MiB"),
            dict(device="cuda", ranks=2, zero=1, set=['train.freeze=["*norm*"]', "batch.accum=2"]),
            dict(device="cuda", pareto=True, largest="micro-batch", device_memory="h100"),
        ]:
            with self.subTest(flags):
                validate("plan", trainer.plan(config="tiny", seq=32, **flags))

    def test_a_plan_that_does_not_fit_is_returned(self):
        run = dict(config="tiny", device="cpu")
        enough = trainer.plan(**run)
        limited = trainer.plan(memory_limit=enough["peak_bytes"] - 1, **run)
        self.assertEqual(limited, enough)
        none = trainer.plan(largest="micro-batch", memory_limit="1MiB", **run)
        validate("plan", none)
        self.assertIsNone(none["largest"]["value"])
        advice = trainer.plan(device_memory=1, **run)["advice"]
        self.assertFalse(advice["fits"])
        with self.assertRaises(trainer.TrainerError) as raised:
            trainer.plan(recompute="auto", memory_budget="1KiB", **run)
        self.assertEqual((raised.exception.exit_code, raised.exception.result), (3, None))

    def test_keywords_are_flags(self):
        sets = ["data.seq=64", "model.layers=3"]
        plan = trainer.plan("--recompute", "full", config="tiny", micro_batch=2, set=sets, pareto=False)
        same = json.loads(subprocess.check_output([
            trainer.binary(), "plan", "--json", "--config", "tiny", "--recompute", "full", "--micro-batch", "2",
            "--set", "data.seq=64", "--set", "model.layers=3"]))
        self.assertEqual(plan, same)
        self.assertNotEqual(plan["peak_bytes"], trainer.plan(config="tiny")["peak_bytes"])

    def test_runs_are_as_their_schemas_say(self):
        (self.folder / "text.txt").write_text("Some words to train on. " * 200)
        between = ["--data=text.txt", "--eval-data=text.txt", "--eval-every=1", "--sample-every=1", "--save-every=1"]
        records = self.train(*between, "--zero=1", out="run")
        records += self.train("--resume=run/checkpoints/step-1", out="resumed", settings=[])
        records += self.train("--set=model.router_aux=0.01", out="mixture", settings=["--config=tiny-moe", *SMALL[1:]])
        for record in records:
            validate("metrics", record)
        kinds = {record["kind"] for record in records}
        self.assertEqual(kinds, {"run", "step", "eval", "sample", "checkpoint", "resume", "ranks", "end"})
        for run in ["run", "run/ranks/0", "resumed", "mixture"]:
            if (self.folder / run / "plan.json").exists():
                validate("plan", self.read(f"{run}/plan.json"))
        step = next(record for record in records if record["kind"] == "step")
        for bad in [{**step, "new_field": 1}, {**step, "peak_bytes": "much"}, {**step, "peak_phase": "lunch"},
                    {name: value for name, value in step.items() if name != "loss"}]:
            with self.assertRaises(ValidationError):
                validate("metrics", bad)

    def test_a_refused_lease_is_as_its_schema_says(self):
        self.train("--memory-limit=2MiB", out="short", exit_code=3)
        validate("oom", self.read("short/oom.json"))

    def test_bench_is_as_its_schema_says(self):
        (self.folder / "matrix.toml").write_text('[matrix]\nrecompute = ["none", "full"]\n')
        shared = dict(matrix=self.folder / "matrix.toml", config="tiny", seq=32, device="cpu")
        planned = trainer.bench(plan_only=True, bless=self.folder / "peaks.json", **shared)
        measured = trainer.bench(rounds=1, **shared)
        for report in [planned, measured]:
            validate("bench", report)
            self.assertEqual([row["strategy"] for row in report["rows"]], ["none", "full"])
        self.assertIsNotNone(measured["rows"][0]["tokens_per_s"])
        with self.assertRaises(trainer.TrainerError) as raised:
            trainer.bench(plan_only=True, check=self.folder / "peaks.json", set="model.ffn=512", **shared)
        self.assertEqual(raised.exception.exit_code, 1)
        self.assertIn("error: peaks have changed", str(raised.exception))
        validate("bench", raised.exception.result)

    def test_check_returns_what_grew(self):
        self.train("--recompute=full", out="base")
        self.train(out="new")
        base, new = self.folder / "base/plan.json", self.folder / "new/plan.json"
        grown = trainer.check(base, new)
        validate("check", grown)
        self.assertTrue(grown["grew"])
        self.assertFalse(trainer.check(new, base)["grew"])
        self.assertFalse(trainer.check(base, new, tolerance="1GiB")["grew"])

    def test_errors_have_the_program_s_words(self):
        with self.assertRaises(trainer.TrainerError) as raised:
            trainer.plan(config="tiny", set="model.hiden=64")
        self.assertIn("did you mean `model.hidden`?", str(raised.exception))
        self.assertEqual((raised.exception.exit_code, raised.exception.result), (2, None))
        with self.assertRaises(trainer.TrainerError) as raised:
            trainer.check(self.folder / "nowhere.json", self.folder / "nowhere.json")
        self.assertEqual(raised.exception.exit_code, 4)

    def test_the_module_is_the_program(self):
        of_module = subprocess.check_output([sys.executable, "-m", "trainer", "--version"], text=True)
        self.assertEqual(of_module, subprocess.check_output([trainer.binary(), "--version"], text=True))
        self.assertIn("cuda", of_module)

    def test_pages_are_where_man_and_shells_look(self):
        share = pathlib.Path(sys.prefix, "share")
        for page in ["man/man1/trainer-plan.1", "bash-completion/completions/trainer", "zsh/site-functions/_trainer"]:
            self.assertIn("recompute", (share / page).read_text())


if __name__ == "__main__":
    unittest.main()
