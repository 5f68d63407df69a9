"""Experts in MXFP4, as gpt-oss is published: 4-bit codes, two to a byte with the earlier one in the low bits, and a power of
two for every 32 of them, which lie along the inputs of a matrix."""
import json

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIGN, BLOCK, EXPONENT_OF_ONE = 8, 32, 127


def with_spread(matrices):
    """Matrices whose blocks have very different sizes, so that a scale at the wrong place shows."""
    blocks = matrices.transpose(1, 2).unflatten(-1, (-1, BLOCK))
    return (blocks * torch.randint(-3, 2, (*blocks.shape[:-1], 1)).exp2()).flatten(-2).transpose(1, 2)


def codes(matrices):
    """Blocks [e, outputs, inputs / 32, 16] and scales [e, outputs, inputs / 32] of matrices [e, inputs, outputs], which is how
    transformers has them in memory."""
    blocks = matrices.transpose(1, 2).float().unflatten(-1, (-1, BLOCK))
    # The largest of a block becomes a code for 4 or 6.
    exponents = blocks.abs().amax(-1).log2().floor() - 2
    scaled = blocks / exponents.exp2().unsqueeze(-1)
    magnitudes = (scaled.abs().unsqueeze(-1) - MAGNITUDES).abs().argmin(-1)
    nibbles = (magnitudes + SIGN * (scaled < 0)).to(torch.uint8)
    packed = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return packed.contiguous(), (exponents + EXPONENT_OF_ONE).to(torch.uint8)


def quantise_experts(folder, config):
    """Puts the experts of a gpt-oss folder into MXFP4, under a configuration that says so. Beside them is what transformers makes
    of the codes in bf16, `widened.safetensors`."""
    tensors, widened = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        blocks, scales = codes(with_spread(tensor))
        tensors |= {name + "_blocks": blocks, name + "_scales": scales}
        widened[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))
    save_file(widened, folder / "widened.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
