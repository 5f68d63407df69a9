"""Tests of the installed wheel with NumPy: arrays go in, and weights come out."""
import gc
import threading
import unittest

import numpy as np
import trainer

SMALL = dict(config="tiny", seq=16, micro_batch=2, device="cpu", steps=100, warmup=2)


class Arrays(unittest.TestCase):
    def model(self, **flags):
        model = trainer.Trainer(**{**SMALL, **flags})
        self.addCleanup(model.close)
        return model

    def setUp(self):
        self.ids = np.random.default_rng(1).integers(0, 127, (2, 17))

    def test_arrays_of_every_whole_type_and_order_are_tokens(self):
        model = self.model()
        expected = model.eval(self.ids.tolist(), self.ids.tolist())
        for kind in "bBhHiIlLqQ":
            ids = self.ids.astype(kind)
            self.assertEqual(model.eval(ids, ids), expected, kind)
        wide = np.zeros((4, 40), np.int64)
        wide[::2, 1:35:2] = self.ids
        for ids in [wide[::2, 1:35:2], np.asfortranarray(self.ids)]:
            self.assertEqual(model.eval(ids, ids), expected)
        for bad in [self.ids.astype(float), self.ids.astype(complex), self.ids[None], self.ids[0], np.array([["a"]])]:
            with self.assertRaises(trainer.UsageError):
                model.eval(bad, bad)

    def test_a_view_shows_what_steps_change_and_cannot_be_written(self):
        model = self.model()
        weight = model.state()["model.layers.0.mlp.down_proj.weight"]
        view = weight.numpy()
        before = view.copy()
        self.assertEqual(view.shape, tuple(weight.shape))
        with self.assertRaises(ValueError):
            view[0] = 1
        model.step(self.ids, self.ids)
        model.step(self.ids, self.ids)
        self.assertFalse(np.array_equal(view, before))
        for refused in [model.sleep, lambda: model.load("anything")]:
            with self.assertRaisesRegex(trainer.UsageError, "1 views"):
                refused()
        model.close()
        self.assertGreater(np.abs(view).max(), 0)
        with self.assertRaisesRegex(trainer.UsageError, "closed"):
            model.step(self.ids, self.ids)

    def test_views_are_counted_before_the_memory_can_move(self):
        model = self.model()
        weight = model.state()["model.norm.weight"]
        ended = threading.Event()

        def look():
            while not ended.is_set():
                try:
                    self.assertTrue(np.isfinite(weight.numpy()).all())
                except trainer.UsageError:
                    pass
        looking = threading.Thread(target=look)
        looking.start()
        slept = 0
        while slept < 50:
            try:
                model.sleep()
                slept += 1
                model.wake()
            except trainer.UsageError:
                pass
        ended.set()
        looking.join()

    def test_a_view_outlives_its_trainer(self):
        model = trainer.Trainer(**SMALL)
        weight = model.state()["model.norm.weight"]
        view = weight.numpy()
        del model, weight
        gc.collect()
        self.assertTrue(np.array_equal(view, np.ones(64, np.float32)))

    def test_what_is_no_view_is_copied_and_says_so(self):
        for flags in [dict(dtype="bf16"), dict(offload_parameters="pinned"), dict(lora=2, base_dtype="nf4")]:
            with self.subTest(flags):
                weight = self.model(**flags).state()["model.layers.0.mlp.down_proj.weight"]
                self.assertEqual(weight.is_view, "dtype" in flags)
                copy = weight.numpy()
                self.assertEqual((copy.dtype, copy.shape), (np.float32, tuple(weight.shape)))
                self.assertGreater(np.abs(copy).max(), 0)
                if not weight.is_view:
                    with self.assertRaisesRegex(BufferError, "no view"):
                        weight.__dlpack__()

    def test_an_array_that_is_gone_after_the_call_does_no_harm(self):
        model = self.model()
        expected = model.eval(self.ids, self.ids)
        for _ in range(20):
            self.assertEqual(model.eval(self.ids.copy(), self.ids.copy()), expected)
            gc.collect()


if __name__ == "__main__":
    unittest.main()
