"""Tests of the installed wheel beside torch and Hugging Face's datasets: tensors go in and come out, and the examples train."""
import gc
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import torch
import trainer

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples/python"
SMALL = dict(config="tiny", seq=16, micro_batch=2, device="cpu", steps=100, warmup=2)


class WithTorch(unittest.TestCase):
    def model(self, **flags):
        model = trainer.Trainer(**{**SMALL, **flags})
        self.addCleanup(model.close)
        return model

    def setUp(self):
        self.ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def example(self, name, *words):
        return subprocess.check_output([sys.executable, EXAMPLES / name, *map(str, words)], text=True)

    def test_tensors_are_tokens(self):
        model = self.model()
        expected = model.eval(self.ids.tolist(), self.ids.tolist())
        wide = torch.zeros(17, 4, dtype=torch.int64)
        wide[:, ::2] = self.ids.T
        for ids in [self.ids, self.ids.to(torch.int32), self.ids.to(torch.uint8), self.ids.T.contiguous().T, wide[:, ::2].T]:
            self.assertEqual(model.eval(ids, ids), expected)
        for bad in [self.ids.float(), self.ids[0], self.ids.float().requires_grad_(), self.ids.to(torch.complex64)]:
            with self.assertRaises((trainer.UsageError, BufferError)):
                model.eval(bad, bad)

    def test_weights_are_views_of_every_type(self):
        for dtype, expected in [("f32", torch.float32), ("bf16", torch.bfloat16)]:
            model = self.model(dtype=dtype)
            weight = model.state()["model.layers.1.mlp.down_proj.weight"]
            view = torch.from_dlpack(weight)
            self.assertEqual((view.dtype, list(view.shape)), (expected, weight.shape))
            before = view.clone()
            for _ in range(3):
                model.step(self.ids, self.ids)
            self.assertFalse(torch.equal(view, before))
            self.assertTrue(torch.equal(view.float(), torch.tensor(weight.numpy())))
            with self.assertRaises(trainer.UsageError):
                model.sleep()
            del view
            gc.collect()
            model.sleep()
            model.wake()

    def test_a_mask_and_advantages_are_tensors(self):
        model = self.model(objective="policy")
        old = torch.tensor(model.log_probs(self.ids).tolist())
        mask = torch.ones_like(self.ids, dtype=torch.bool)
        for advantages in [torch.tensor([1.0, -1.0]), torch.ones(2, 17).to(torch.bfloat16), torch.ones(2, 17, dtype=torch.float64)]:
            model.policy_step(self.ids, mask, advantages, old)
        with self.assertRaisesRegex(trainer.UsageError, "`advantages` at"):
            model.policy_step(self.ids, mask, torch.tensor([float("nan"), 1.0]), old)

    def test_a_data_loader_fine_tunes_a_folder_s_model(self):
        self.model(seq=64).export(self.folder / "model")
        said = self.example("finetune_with_dataloader.py", self.folder / "model", self.folder / "tuned")
        losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", said)]
        self.assertEqual(len(losses), 64)
        self.assertLess(losses[-1], losses[0] - 1, said)
        self.assertTrue((self.folder / "tuned/model.safetensors").exists())

    def test_a_pipeline_of_datasets_trains(self):
        said = self.example("huggingface_datasets.py", self.folder / "run")
        losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", said)]
        self.assertLess(losses[-1], losses[0] - 0.5, said)
        self.assertTrue(list((self.folder / "run/checkpoints").iterdir()))


if __name__ == "__main__":
    unittest.main()
