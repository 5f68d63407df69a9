"""Tests of the installed wheel: a model is trained in this process, and the command goes on where it stopped."""
import array
import ast
import contextlib
import ctypes
import gc
import inspect
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
import unittest

import trainer

SEQ, ROWS = 32, 4
SMALL = dict(config="tiny", seq=SEQ, micro_batch=2, accum=2, device="cpu", lr=1e-3, steps=8, warmup=2)
TEXT = bytes(range(32, 127)) * 40


def batch(number):
    """The rows that the command makes of TEXT for a step, from 0, if it does not shuffle: each token but the first of a row is a target."""
    first = number * ROWS
    return [list(TEXT[row * SEQ:row * SEQ + SEQ + 1]) for row in range(first, first + ROWS)]


def losses(model, numbers):
    return [model.step(batch(number), batch(number))["loss"] for number in numbers]


class InProcess(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "text.txt").write_bytes(TEXT)

    def model(self, **flags):
        model = trainer.Trainer(**{**SMALL, **flags})
        self.addCleanup(model.close)
        return model

    def command(self, *words, out):
        """Trains as a command; returns the records of its steps."""
        flags = [*words, "--data=text.txt", "--no-shuffle", "--quiet", f"--out={out}"]
        done = subprocess.run([trainer.binary(), *flags], capture_output=True, text=True, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = (self.folder / out / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == "step"]

    def flags(self):
        return [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]

    def test_steps_have_the_bits_and_the_peak_of_the_command_s(self):
        theirs = self.command(*self.flags(), out="run")
        model = self.model()
        ours = losses(model, range(8))
        self.assertEqual(ours, [record["loss"] for record in theirs])
        self.assertNotEqual(ours[0], ours[-1])
        for own, other in zip(model.metrics, theirs):
            for key in ["step", "grad_norm", "lr", "tokens", "peak_bytes", "planned_peak_bytes", "peak_by_category"]:
                self.assertEqual(own[key], other[key], key)
        self.assertEqual(model.plan()["peak_bytes"], theirs[0]["peak_bytes"])

    def test_steps_of_fewer_and_shorter_rows_have_their_planned_peak(self):
        model = self.model(packing="pad", seq=128)
        for rows, tokens in [(4, 129), (1, 128), (3, 60), (2, 7)]:
            ids = [list(TEXT[:tokens])] * rows
            record = model.step(ids, ids)
            self.assertEqual(record["peak_bytes"], record["planned_peak_bytes"], (rows, tokens))

    def test_the_command_goes_on_from_a_program_s_checkpoint_and_a_program_from_the_command_s(self):
        model = self.model()
        losses(model, range(3))
        saved = model.save(self.folder / "own")
        ours = losses(model, range(5))
        theirs = self.command(f"--resume={saved}", out="resumed")
        self.assertEqual(ours, [record["loss"] for record in theirs])

        whole = self.command(*self.flags(), "--save-every=3", out="run")
        model.load(self.folder / "run/checkpoints/step-3")
        self.assertEqual(model.steps, 3)
        self.assertEqual(losses(model, range(3, 8)), [record["loss"] for record in whole[3:]])

    def test_a_checkpoint_s_weights_can_be_taken_alone(self):
        model, other = self.model(), self.model(seed=7)
        losses(model, range(2))
        model.export(self.folder / "exported")
        self.assertNotEqual(other.eval(batch(0), batch(0)), model.eval(batch(0), batch(0)))
        other.load(self.folder / "exported")
        self.assertEqual(other.eval(batch(0), batch(0)), model.eval(batch(0), batch(0)))
        self.assertEqual(other.steps, 0)

    def test_a_step_s_loss_is_that_of_all_its_labels_in_whatever_rows(self):
        ids = [list(TEXT[:SEQ]), list(TEXT[7:7 + SEQ])]
        labels = [ids[0], [-100] * 20 + ids[1][20:]]
        together, apart = self.model(), self.model(micro_batch=1)
        both = [model.step(ids, labels) for model in (together, apart)]
        self.assertEqual([record["tokens"] for record in both], [31 + 12] * 2)
        self.assertAlmostEqual(both[0]["loss"], both[1]["loss"], delta=1e-6)
        expected = (31 * apart.eval(ids[:1], labels[:1]) + 12 * apart.eval(ids[1:], labels[1:])) / 43
        self.assertAlmostEqual(apart.eval(ids, labels), expected, delta=1e-6)

    def test_documents_of_a_row_do_not_see_each_other(self):
        model = self.model(packing="first-fit", attention="flash")
        first, second, third = list(TEXT[:12]), list(TEXT[50:70]), list(TEXT[20:32])

        def loss(documents):
            ids = [token for document in documents for token in document]
            return model.eval([ids], [ids], [[place for document in documents for place in range(len(document))]])
        together, other = loss([first, second]), loss([third, second])
        alone = {len(document): model.eval([document], [document]) for document in (first, second)}
        self.assertAlmostEqual(together, (11 * alone[12] + 19 * alone[20]) / 30, delta=1e-6)
        self.assertNotEqual(together, other)
        with self.assertRaisesRegex(trainer.UsageError, "first-fit"):
            self.model().step([first + second], [first + second], [[*range(12), *range(20)]])

    def test_text_is_generated_as_it_was_planned(self):
        model = self.model(generate=(3, 24))
        prompts = [[1, 2, 3], [4], [5, 6]]
        made = model.generate(prompts, 8, seed=3)
        self.assertEqual([len(tokens) for tokens in made], [8] * 3)
        self.assertEqual(made, model.generate(prompts, 8, seed=3))
        self.assertNotEqual(made, model.generate(prompts, 8, seed=4))
        greedy = model.generate(prompts[:1], 8, temperature=0.0)[0]
        self.assertEqual(model.generate(prompts[:1], 8, temperature=0.0, ends=[greedy[2]])[0], greedy[:greedy.index(greedy[2])])
        losses(model, range(1))
        for bad, words in [(lambda: model.generate(prompts * 2, 8), "1 to 3"), (lambda: model.generate(prompts, 22), "1 to 24 tokens"),
                           (lambda: model.generate([[]], 1), "0 tokens"), (lambda: model.generate([[256]], 1), "256"),
                           (lambda: self.model().generate(prompts, 1), "not planned"), (lambda: model.generate(prompts, 1, temperature=-1.0), "temperature"),
                           (lambda: model.generate(prompts, 1, top_p=float("nan")), "top_p"), (lambda: model.generate(prompts, 2**64 - 1), "1 to 24 tokens"),
                           (lambda: self.model(generate=(0, 8)), "texts"), (lambda: self.model(generate=(1, SEQ + 2)), "data.seq")]:
            with self.assertRaisesRegex(trainer.UsageError, words):
                bad()

    def policy(self, **flags):
        """A trainer of a policy, four texts with prompts of eight tokens, their mask and advantages."""
        model = self.model(objective="policy", **flags)
        ids = [list(TEXT[row:row + 24]) for row in range(4)]
        return model, ids, [[0] * 8 + [1] * (16 - row) + [0] * row for row in range(4)], [1.0, -1.0, 0.5, -0.5]

    def test_log_probabilities_are_those_of_the_loss(self):
        model, ids, _, _ = self.policy()
        log_probs = model.log_probs(ids)
        self.assertEqual((log_probs.shape, log_probs.format), ((4, 24), "f"))
        rows = log_probs.tolist()
        self.assertEqual([row[0] for row in rows], [0.0] * 4)
        self.assertAlmostEqual(-sum(map(sum, rows)) / (4 * 23), model.eval(ids, ids), delta=1e-5)
        self.assertEqual(model.log_probs(ids * 3).tolist(), rows * 3)
        self.assertEqual(model.log_probs([ids[2][:11]]).tolist()[0][:11], rows[2][:11])
        self.assertEqual(self.model().log_probs(ids).tolist(), rows)

    def test_a_policy_learns_what_is_better(self):
        for loss in ["grpo", "dr_grpo", "gspo", "ppo"]:
            model, ids, mask, advantages = self.policy(lr=3e-3)
            began = model.log_probs(ids)

            def gain(row):
                now, before = model.log_probs(ids).tolist()[row], began.tolist()[row]
                return sum(b - a for a, b, on in zip(before, now, mask[row]) if on)
            for _ in range(4):
                record = model.policy_step(ids, mask, advantages, began, began, clip=(0.2, 0.3), beta=0.01, loss=loss,
                                           max_completion_length=16 if loss == "dr_grpo" else None)
                self.assertEqual(record["peak_bytes"], record["planned_peak_bytes"])
            self.assertGreater(gain(0) - gain(1), 0.05, loss)
            self.assertGreater(record["policy_kl"], 0)
            self.assertEqual(model.metrics[0]["policy_clip_share"], 0)

    def test_the_reference_is_the_model_under_adapters(self):
        model, ids, mask, advantages = self.policy(lora=4)
        began = model.log_probs(ids).tolist()
        self.assertEqual(model.policy_step(ids, mask, advantages, model.log_probs(ids), beta=0.1)["policy_kl"], 0)
        model.policy_step(ids, mask, advantages, model.log_probs(ids), beta=0.1)
        self.assertNotEqual(model.log_probs(ids).tolist(), began)
        self.assertEqual(model.log_probs(ids, reference=True).tolist(), began)
        self.assertGreater(model.policy_step(ids, mask, advantages, model.log_probs(ids), beta=0.1)["policy_kl"], 0)

    def test_what_no_policy_can_learn_from_is_refused(self):
        model, ids, mask, advantages = self.policy()
        old = model.log_probs(ids)
        nan = [[float("nan")] * 24] * 4
        for arguments, named, words in [
            ((ids, mask, nan, old), {}, "`advantages` at"), ((ids, mask, advantages, nan), {}, "`old_log_probs` at \\[0, 8\\]"), ((ids, mask, [1.0], old), {}, "each has one"),
            ((ids, [[0] * 24] * 4, advantages, old), {}, "one to learn from"), ((ids, mask, advantages, old), dict(beta=0.1), "no `reference`"),
            ((ids, mask, advantages, old), dict(loss="sft"), "gspo or ppo"), ((ids, mask, advantages, old), dict(loss="dr_grpo"), "max_completion_length"),
            ((ids, mask, advantages, old), dict(clip=-1.0), "at least 0"), ((ids, mask[:1], advantages, old), {}, "each has one"),
            ((ids, mask, advantages, [-1.0] * 4), {}, "old_log_probs.* each has one$"),
            ((ids, mask, advantages, old), dict(max_completion_length=9), "for dr_grpo alone"),
            ((ids, mask, advantages, [["a"]]), {}, "something else than numbers"),
        ]:
            with self.subTest(words=words), self.assertRaisesRegex(trainer.UsageError, words):
                model.policy_step(*arguments, **named)
        with self.assertRaisesRegex(trainer.UsageError, "take policy_step"):
            model.step(ids, ids)
        with self.assertRaisesRegex(trainer.UsageError, "objective"):
            self.model().policy_step(ids, mask, advantages, old)
        self.assertEqual(model.steps, 0)

    def test_arrays_of_the_buffer_protocol_are_tokens(self):
        model = self.model()
        rows = batch(0)
        expected = model.eval(rows, rows)
        flat = [token for row in rows for token in row]
        for kind in "bBhHiIlLqQ":
            flat_view = memoryview(array.array(kind, flat)).cast("B")
            view = flat_view.cast(kind, [ROWS, SEQ + 1])
            self.assertEqual(model.eval(view, view), expected, kind)

    def test_what_is_no_batch_is_refused_and_changes_nothing(self):
        model = self.model()
        good = batch(0)
        before = model.eval(good, good)
        short = [row[:5] for row in good]
        floats = memoryview(array.array("d", [0.0] * 8)).cast("B").cast("d", [2, 4])
        for ids, labels, words in [
            (good, short, "every token has one"), ([[1, 2], [3]], [[1, 2], [3]], "differ in length"), (floats, floats, "whole numbers"),
            (5, 5, "is int"), ("text", "text", "is str"), ([["a"]], [["a"]], "something else than numbers"), ([1, 2], [1, 2], "whole numbers"),
            ([], [], "are \\[0|whole numbers"), ([[]], [[]], "2 to 33"), (good * 2, good * 2, "1 to 4"), ([[1] * 40], [[1] * 40], "2 to 33"),
            ([[256, 0]], [[0, 0]], "`input_ids` at \\[0, 0\\] is 256"), ([[-1, 0]], [[0, 0]], "0 to 255"), ([[1, 2]], [[1, 256]], "`labels` at \\[0, 1\\]"),
            ([[1, 2]], [[-100, -100]], "one to learn from"), ([[1]], [[1]], "2 to 33"), (None, None, "is NoneType"),
        ]:
            with self.subTest(words=words), self.assertRaisesRegex(trainer.UsageError, words):
                model.step(ids, labels)
        self.assertEqual((model.steps, model.eval(good, good)), (0, before))

    def test_refused_memory_names_the_tensor_and_settings_that_fit(self):
        peak = self.model(seq=128).plan()["peak_bytes"]
        with self.assertRaises(trainer.OutOfMemory) as raised:
            self.model(seq=128, memory_limit=peak - 1)
        error = raised.exception
        self.assertIsInstance(error, MemoryError)
        self.assertEqual(error.exit_code, 3)
        self.assertIsInstance(error.tensor, str)
        self.assertIn(error.tensor, str(error))
        self.assertIn("hint: cheapest fix", str(error))
        fix = error.fixes[0]
        fitting = self.model(seq=128, memory_limit=peak - 1, set=fix["set"])
        ids = [list(TEXT[:129])] * 4
        self.assertEqual(fitting.step(ids, ids)["peak_bytes"], fix["peak_bytes"])

    def test_flags_that_cannot_be_are_refused_with_the_command_s_words(self):
        for flags, words in [(dict(confg="tiny"), "--confg"), (dict(lr="fast"), "fast"), (dict(data="text.txt"), "pass batches"),
                             (dict(resume="x"), "load the checkpoint"), (dict(device="cuda:99"), "cuda"), (dict(recompute="sometimes"), "sometimes"),
                             (dict(init_from="/nowhere"), "nowhere"), (dict(objective="dpo", lora=2), "preferences")]:
            with self.subTest(flags), self.assertRaisesRegex(trainer.TrainerError, words):
                self.model(**flags)

    def test_an_interrupted_step_leaves_nothing(self):
        model, other = self.model(steps=10**6), self.model(steps=10**6)
        timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with self.assertRaises(KeyboardInterrupt):
            while True:
                losses(model, [0])
        timer.join()
        self.assertEqual(len(model.metrics), model.steps)
        for _ in range(model.steps):
            losses(other, [0])
        self.assertEqual(losses(model, [1]), losses(other, [1]))

    def test_threads_take_turns(self):
        model = self.model(steps=100)
        threads = [threading.Thread(target=losses, args=(model, [0] * 10)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(model.steps, 40)

    def test_a_fork_has_no_trainer(self):
        model = self.model()
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    model.steps
                except trainer.UsageError as error:
                    code = 0 if "fork" in str(error) else 2
            os._exit(code)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        losses(model, [0])

    def test_a_closed_trainer_says_so(self):
        with trainer.Trainer(**SMALL) as model:
            losses(model, [0])
        model.close()
        with self.assertRaisesRegex(trainer.UsageError, "closed"):
            losses(model, [0])

    def test_adapters_are_trained_and_written(self):
        base = self.model()
        base.export(self.folder / "base")
        model = self.model(config=None, init_from=self.folder / "base", lora=4)
        self.assertTrue(all("lora" in name for name in model.state() if "lora" in name))
        losses(model, range(3))
        model.export(self.folder / "adapters")
        with self.assertRaisesRegex(trainer.TrainerError, "another model"):
            self.model(lora=4, seed=7).load(self.folder / "adapters")
        again = self.model(config=None, lora_from=self.folder / "adapters")
        self.assertEqual(again.eval(batch(0), batch(0)), model.eval(batch(0), batch(0)))
        self.assertTrue((self.folder / "adapters/adapter_config.json").exists())

    def test_a_trainer_that_slept_has_the_bits_of_one_that_did_not(self):
        awake, sleepy = self.model(recompute="full"), self.model(recompute="full")
        for number in range(4):
            expected = losses(awake, [number])
            self.assertEqual(losses(sleepy, [number]), expected)
            self.assertEqual(sleepy.metrics[-1]["peak_bytes"], sleepy.metrics[-1]["planned_peak_bytes"])
            handed = sleepy.sleep()
            self.assertEqual((handed["given_back_bytes"], handed["held_bytes"]), (sleepy.plan()["reserved_bytes"], 0))
            for refused in [lambda: losses(sleepy, [0]), lambda: sleepy.eval(batch(0), batch(0)), sleepy.sleep, sleepy.state,
                            lambda: sleepy.save(self.folder / "x"), lambda: sleepy.export(self.folder / "x"), lambda: sleepy.load(self.folder)]:
                with self.assertRaisesRegex(trainer.TrainerError, "sleeps|holds no|NoneWhole|no checkpoint"):
                    refused()
            sleepy.wake()
        sleepy.wake()
        with self.assertRaisesRegex(trainer.UsageError, "level is 3"):
            sleepy.sleep(3)

    def test_what_a_checkpoint_has_need_not_be_kept(self):
        awake, sleepy = self.model(), self.model()
        with self.assertRaisesRegex(trainer.UsageError, "save a checkpoint"):
            sleepy.sleep(2)
        for number in range(3):
            self.assertEqual(losses(sleepy, [number]), losses(awake, [number]))
            sleepy.save(self.folder / "run")
            self.assertEqual(sleepy.sleep(2)["kept_on_host_bytes"], 0)
            sleepy.wake()
        losses(sleepy, [3])
        with self.assertRaisesRegex(trainer.UsageError, "save a checkpoint"):
            sleepy.sleep(2)
        saved = pathlib.Path(sleepy.save(self.folder / "run"))
        (saved / "model.safetensors").rename(saved / "moved")
        with self.assertRaises(trainer.TrainerError):
            sleepy.sleep(2)
        (saved / "moved").rename(saved / "model.safetensors")
        sleepy.sleep(2)
        (saved / "model.safetensors").rename(saved / "moved")
        with self.assertRaises(trainer.TrainerError):
            sleepy.wake()
        (saved / "moved").rename(saved / "model.safetensors")
        sleepy.wake()
        losses(awake, [3])
        self.assertEqual(losses(sleepy, [4]), losses(awake, [4]))

    def test_two_hundred_sleeps_give_everything_back(self):
        def resident():
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        model = self.model(set=["model.hidden=256", "model.ffn=1024"])
        losses_before = losses(model, [0])
        sizes, handed = [], set()
        for _ in range(200):
            handed.add(tuple(model.sleep().items()))
            sizes.append(resident())
            model.wake()
        self.assertEqual(len(handed), 1)
        self.assertLess(max(sizes[100:]) - max(sizes[:100]), 64 << 20)
        self.assertEqual(len(losses(model, [1]) + losses_before), 2)

    def test_an_unread_capsule_is_given_back(self):
        model = self.model()
        weight = model.state()["model.norm.weight"]
        self.assertTrue(weight.is_view)
        self.assertEqual((weight.shape, weight.dtype, weight.__dlpack_device__()), ([64], "f32", (1, 0)))
        for version in [None, (1, 0), (0, 8)]:
            capsule = weight.__dlpack__(max_version=version)
            with self.assertRaisesRegex(trainer.UsageError, "1 views"):
                model.load(self.folder)
            del capsule
            gc.collect()
        with self.assertRaises(BufferError):
            weight.__dlpack__(copy=True)
        model.save(self.folder / "run")
        model.load(self.folder / "run")

    def test_everything_public_is_described_and_typed(self):
        stub = ast.parse(pathlib.Path(trainer.__file__).with_name("__init__.pyi").read_text())
        classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
        functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
        self.assertEqual(set(trainer.__all__), {name for name in {*classes, *functions} if not name.startswith("_")})
        for name in trainer.__all__:
            self.assertTrue(inspect.getdoc(getattr(trainer, name)), name)
        for owner in (trainer.Trainer, trainer.Weight):
            public = {name for name in vars(owner) if not name.startswith("_")}
            typed = {node.name for node in classes[owner.__name__].body if isinstance(node, ast.FunctionDef)}
            self.assertEqual(public, {name for name in typed if not name.startswith("_")})
            for name in public:
                self.assertTrue(inspect.getdoc(getattr(owner, name)), name)
        self.assertTrue(pathlib.Path(trainer.__file__).with_name("py.typed").exists())


if __name__ == "__main__":
    unittest.main()
