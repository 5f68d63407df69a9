"""Threads and shared memory in scripts/sass/kernels.py beside those of the launch code, which the example step_calls lists.

  python3 -m unittest discover -s scripts/sass/tests      cargo builds the example, as its tests do
"""
import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from sass import calls, kernels

# Rows of 1,024, of 4,096 and of 8,192 elements, heads of 64 and of 128, both kinds of norm and of attention, ranks, frozen models as
# codes, experts, products in FP8 with replays, and a gate behind attention: of each kernel the blocks of large tensors.
STEPS = [
    ("gpt2", ["attention.backend=flash", "model.hidden=4096", "model.heads=64", "model.kv_heads=64", "model.max_positions=4096"]),
    ("qwen3-8b", ["attention.backend=eager", "collectives.zero=2", "model.heads=64"]),
    ("llama-3-8b", ["attention.backend=flash", "collectives.zero=2", "model.hidden=8192", "optim.master=bf16-split",
                    "optim.state_dtype=8bit", "optim.grad_dtype=bf16"]),
    ("llama-3-8b", ["lora.rank=16", "lora.base_dtype=nf4"]),
    ("llama-3-8b", ["lora.rank=16", "lora.base_dtype=8bit"]),
    ("mixtral-8x7b", ["lora.rank=16", "lora.base_dtype=mxfp4"]),
    ("mixtral-8x7b", ["attention.backend=flash"]),
    ("qwen3-30b-a3b", ["attention.backend=flash", "optim.grad_dtype=bf16"]),
    ("mixtral-8x7b", ["attention.backend=flash", "attention.kernels=sm90", "experts.kernels=sm90"]),
    ("gpt2", ["attention.backend=flash", "attention.kernels=sm90", "model.hidden=4096", "model.heads=64", "model.kv_heads=64", "model.max_positions=4096"]),
    ("qwen3-30b-a3b", ["attention.backend=flash", "optim.grad_dtype=bf16", "experts.kernels=sm90"]),
    ("qwen3.5-9b", ["attention.backend=flash", "model.layers=2", "model.delta.attention_layers=[1]"]),
    ("llama-3-8b", ["fp8.recipe=tensor", "recompute.spec=layernorm,mlp_act", "batch.accum=2", "model.hidden=1024", "model.heads=8"]),
    ("gpt2", ["fp8.recipe=tensor", "recompute.spec=layernorm,mlp_act", "model.hidden=1024", "model.heads=16", "model.kv_heads=16", "model.max_positions=4096"]),
]


class Launches(unittest.TestCase):
    maxDiff = None

    def test_blocks_are_those_of_the_launch_code(self):
        largest = {}
        for preset, settings in STEPS:
            launched = calls.of_step(preset, ["train.device=cuda", "train.dtype=bf16", "data.seq=4096", "model.layers=1", *settings])
            for call in launched:
                if call.kernel in kernels.LAUNCHES:
                    launch = kernels.Launch(call.threads, call.shared_bytes)
                    largest[call.kernel] = max(launch, largest.get(call.kernel, launch), key=lambda each: each.threads)
        self.assertEqual(largest, kernels.LAUNCHES)


if __name__ == "__main__":
    unittest.main()
