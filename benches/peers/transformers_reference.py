#!/usr/bin/env python3
"""Trains small random models of every family with Hugging Face transformers itself, and writes what it computed, so that
the trainer can be held against it.

  eval "$(benches/peers/setup_torch)"
  LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON benches/peers/transformers_reference.py OUT [--families llama gpt2]

OUT/FAMILY is a model folder as `save_pretrained` writes it (the weights before the first step) with, beside it,
`batches.safetensors` (what `trainer --data` reads), `reference.json` (the same batches, settings and seed, and of every
step loss and gradient norm), `grads_step0.safetensors` (the first step's gradients, before clipping) and
`model_final.safetensors` (the weights after the last step). The figures are those of transformers' own forward pass and
loss, PyTorch's backward pass, clipping and AdamW, in f32 on one thread.

Tensors in these files have the names and shapes of the model's own files: a matrix for each expert, and one of all experts in
gpt-oss. Experts of a family whose name ends in `mxfp4` are codes, which transformers widens before the first step. With a loss
of balance, a step's loss is that of the targets plus the coefficient times the mean of the micro-batches' balance; `loss` is
that of the targets alone.

For GPT-2 two mistakes are made on purpose (`broken` in `reference.json`), for Mistral's window, which is one key longer and one
shorter, and for what other families add to Llama (`MISTAKES`): their figures have to be beyond every tolerance. Rows of a
family whose name ends in `padded` end in padding, which transformers is told by `attention_mask`, and `reference.json` by
`lengths`.
"""
import argparse
import copy
import json
import pathlib

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

import mxfp4

transformers.utils.logging.disable_progress_bar()

SEED, STEPS, ACCUM, MICRO_BATCH, SEQ, VOCAB = 20261121, 5, 2, 2, 19, 53
LONGER_SEQ = dict(qwen3_5=70)
MASKED = -100
MASKED_SHARE = [0.1, 0.6]  # of each micro-batch's targets: a mean of means is not the mean
OPTIMIZER = dict(name="adamw", lr=1e-3, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1,
                 weight_decay_on="matrices (norm weights and biases excluded)", clip_grad_norm=1.0, clip_eps=1e-6)


def without(settings, name):
    return {key: value for key, value in settings.items() if key != name}


# All widths differ, and, where a family allows it, the query heads together are not as wide as the hidden state.
LLAMA = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
             num_key_value_heads=1, head_dim=10, rms_norm_eps=1e-5, max_position_embeddings=64, tie_word_embeddings=False,
             bos_token_id=None, eos_token_id=None, pad_token_id=None)
# Waves of at most 16 tokens are kept, those from 64 on are stretched, and those between are blended: these heads have
# all three.
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64)
# Of these heads' pairs the first is kept, the last two are stretched, and two are blended.
YARN_ROPE = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, beta_fast=4.0, beta_slow=0.5,
                 original_max_position_embeddings=64)
WINDOW = 5
MIXTURE = dict(output_router_logits=True, sliding_window=None)
# Heads of queries and keys are wider than those of values; the first layer is dense.
LATENT = dict(without(LLAMA, "head_dim"), num_hidden_layers=3, num_key_value_heads=3, kv_lora_rank=16, qk_nope_head_dim=8,
              qk_rope_head_dim=6, v_head_dim=10, moe_intermediate_size=14, first_k_dense_replace=1)
ROPE = dict(rope_type="default", rope_theta=10_000.0)
# All pairs turn visibly within these sequences.
NEAR_ROPE = dict(rope_type="default", rope_theta=50.0)
# A bias on columns of keys that neither turn nor are normed moves all scores of a row alike: its gradient is nothing but
# rounding, which AdamW makes whole steps of. So `attention_bias` is on only where keys are normed.
GLM = dict(partial_rotary_factor=0.5, first_k_dense_replace=1, moe_intermediate_size=14, norm_topk_prob=True,
           num_mtp_layers=0)
# The temperature changes every 4 positions; the first pair is kept, the last is stretched, the others are blended.
TEMPERATURE_ROPE = dict(rope_type="yarn", rope_theta=500.0, factor=16.0, beta_fast=0.5, beta_slow=0.01, mscale=1.0,
                        mscale_all_dim=1.0, original_max_position_embeddings=4, llama_4_scaling_beta=0.7)
# Three quarters of each head turn: three pairs, each with factors of its own. Phi3 wants heads of hidden_size / heads.
LONG_ROPE = dict(rope_type="longrope", rope_theta=100.0, partial_rotary_factor=0.75, short_factor=[1.3, 0.6, 2.1],
                 long_factor=[2.5, 4.0, 9.0])
# Scores and logits reach the caps, and 1 / sqrt(query_pre_attn_scalar) is not the scale that the heads' width would give.
CAPS = dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=4)
SCALED_ROPE = dict(rope_type="linear", rope_theta=500.0, factor=2.5)
# Of these heads' pairs the first is kept, the last two are stretched, and two are blended, by other shares than if the ramp's
# ends were rounded.
UNROUNDED_ROPE = dict(rope_type="yarn", rope_theta=150.0, factor=32.0, beta_fast=4.0, beta_slow=1.0, truncate=False,
                      original_max_position_embeddings=64)
# The keys of the published files: no `rope_parameters`, no `swiglu_alpha`, experts in MXFP4.
PUBLISHED = dict(
    architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0, bos_token_id=None, eos_token_id=None,
    experts_per_token=2, head_dim=6, hidden_act="silu", hidden_size=32, initial_context_length=4096, initializer_range=0.02,
    intermediate_size=64, layer_types=["sliding_attention", "full_attention"], max_position_embeddings=131072,
    model_type="gpt_oss", num_attention_heads=4, num_experts_per_tok=2, num_hidden_layers=2, num_key_value_heads=2,
    num_local_experts=3, output_router_logits=False, pad_token_id=None,
    quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=[
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]),
    rms_norm_eps=1e-5, rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
                                         rope_type="yarn", truncate=False),
    rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=WINDOW, swiglu_limit=0.9, tie_word_embeddings=False,
    transformers_version="4.55.0.dev0", use_cache=True, vocab_size=VOCAB)
# A quarter of each head of attention turns. Widths of all heads differ. The rule's output is nearly 0 where a query meets the first
# key at a right angle, and the norm behind it would make rounding large without such an epsilon.
HYBRID = dict(LLAMA, rms_norm_eps=0.01, num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
              linear_key_head_dim=6, linear_value_head_dim=5, rope_parameters=NEAR_ROPE | dict(partial_rotary_factor=0.25))
LINEAR, FULL = "linear_attention", "full_attention"
CONFIGS = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "llama3": transformers.LlamaConfig(**LLAMA | dict(rope_parameters=LLAMA3_ROPE, max_position_embeddings=512,
                                                      tie_word_embeddings=True)),
    "qwen2": transformers.Qwen2Config(**LLAMA | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=6,
                                                     tie_word_embeddings=True)),
    "qwen3": transformers.Qwen3Config(**LLAMA | dict(rms_norm_eps=1e-6)),
    "mistral": transformers.MistralConfig(**LLAMA | dict(sliding_window=None, num_attention_heads=6, num_key_value_heads=3,
                                                         head_dim=8)),
    "llama_biases": transformers.LlamaConfig(**LLAMA | dict(attention_bias=True, mlp_bias=True, rope_parameters=dict(
        rope_type="linear", rope_theta=500.0, factor=2.5))),
    "llama_yarn": transformers.LlamaConfig(**LLAMA | dict(rope_parameters=YARN_ROPE, max_position_embeddings=256)),
    "mistral_window": transformers.MistralConfig(**LLAMA | dict(sliding_window=WINDOW, num_attention_heads=6,
                                                                num_key_value_heads=3, head_dim=8)),
    "qwen2_window": transformers.Qwen2Config(**LLAMA | dict(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=6, use_sliding_window=True,
        sliding_window=WINDOW - 1, layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "qwen3_window": transformers.Qwen3Config(**LLAMA | dict(
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, attention_bias=True,
        max_position_embeddings=256, rope_parameters=YARN_ROPE | dict(attention_factor=1.3, truncate=False))),
    "phi3": transformers.Phi3Config(**LLAMA | dict(sliding_window=WINDOW + 2, num_attention_heads=6, num_key_value_heads=2,
                                                   head_dim=4)),
    "mixtral": transformers.MixtralConfig(**LLAMA | MIXTURE | dict(
        num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.05, rope_parameters=ROPE)),
    "mixtral_padded": transformers.MixtralConfig(**LLAMA | MIXTURE | dict(
        intermediate_size=12, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.2, rope_parameters=ROPE)),
    "qwen2_moe": transformers.Qwen2MoeConfig(**LLAMA | MIXTURE | dict(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=6, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=14, shared_expert_intermediate_size=22, norm_topk_prob=False, mlp_only_layers=[1],
        router_aux_loss_coef=0.1)),
    "qwen3_moe": transformers.Qwen3MoeConfig(**LLAMA | MIXTURE | dict(
        num_hidden_layers=3, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=14, norm_topk_prob=True,
        decoder_sparse_step=2, output_router_logits=False)),
    "deepseek_v2": transformers.DeepseekV2Config(**LATENT | dict(
        n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, topk_method="group_limited_greedy", n_group=3,
        topk_group=2, routed_scaling_factor=1.7, q_lora_rank=None, rope_parameters=YARN_ROPE | dict(mscale=0.7, mscale_all_dim=0.9),
        max_position_embeddings=256)),
    "deepseek_v3": transformers.DeepseekV3Config(**LATENT | dict(
        n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=4, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=2.5, q_lora_rank=18, num_mtp_layers=0)),
    "deepseek_v2_queries": transformers.DeepseekV2Config(**LATENT | dict(
        num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, topk_method="greedy",
        routed_scaling_factor=1.0, q_lora_rank=18, rope_parameters=ROPE)),
    "deepseek_v3_yarn": transformers.DeepseekV3Config(**LATENT | dict(
        num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=2, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=1.5, q_lora_rank=18, num_mtp_layers=0, max_position_embeddings=256,
        rope_parameters=YARN_ROPE | dict(mscale=1.2, mscale_all_dim=0.8))),
    "gpt2": transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=30, n_layer=2, n_head=3, n_inner=74,
                                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None),
    # By the rule of `no_rope_layer_interval` only the fourth layer would not turn.
    "smollm3": transformers.SmolLM3Config(**LLAMA | dict(
        num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_parameters=NEAR_ROPE,
        no_rope_layers=[0, 1, 1, 1, 0], tie_word_embeddings=True)),
    "smollm3_window": transformers.SmolLM3Config(**LLAMA | dict(
        num_hidden_layers=3, rope_parameters=NEAR_ROPE, no_rope_layer_interval=2, mlp_bias=True,
        use_sliding_window=True, sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"])),
    "glm4_moe": transformers.Glm4MoeConfig(**LLAMA | GLM | dict(
        num_hidden_layers=3, head_dim=12, use_qk_norm=True, attention_bias=True, n_routed_experts=8, num_experts_per_tok=3,
        n_shared_experts=2, n_group=2, topk_group=1, routed_scaling_factor=2.5)),
    "glm4_moe_air": transformers.Glm4MoeConfig(**LLAMA | GLM | dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, use_qk_norm=False, n_routed_experts=6,
        num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.0)),
    "glm4_moe_lite": transformers.Glm4MoeLiteConfig(**without(LATENT, "first_k_dense_replace") | dict(
        n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=1.8, q_lora_rank=18,
        rope_parameters=ROPE, mlp_layer_types=["dense", "sparse", "sparse"])),
    "granite": transformers.GraniteConfig(**LLAMA | dict(
        embedding_multiplier=12.0, attention_multiplier=2.0, residual_multiplier=0.3, logits_scaling=10.0)),
    "granite_biases": transformers.GraniteConfig(**LLAMA | dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, attention_bias=True, mlp_bias=True,
        embedding_multiplier=0.4, attention_multiplier=0.125, residual_multiplier=1.6, logits_scaling=0.5,
        tie_word_embeddings=True)),
    "olmo2": transformers.Olmo2Config(**LLAMA | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)),
    # Layers with a window turn by other angles, which nothing stretches.
    "olmo3": transformers.Olmo3Config(**LLAMA | dict(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=WINDOW,
        max_position_embeddings=256, rope_parameters=dict(full_attention=YARN_ROPE, sliding_attention=NEAR_ROPE))),
    "ministral3": transformers.Ministral3Config(**LLAMA | dict(rope_parameters=TEMPERATURE_ROPE)),
    "phi3_long": transformers.Phi3Config(**LLAMA | dict(
        head_dim=8, original_max_position_embeddings=64, max_position_embeddings=256, rope_parameters=dict(LONG_ROPE),
        tie_word_embeddings=True)),
    "phi3_longer": transformers.Phi3Config(**LLAMA | dict(
        head_dim=8, original_max_position_embeddings=12, max_position_embeddings=48, rope_parameters=dict(LONG_ROPE))),
    "gemma2": transformers.Gemma2Config(**LLAMA | CAPS | dict(
        num_hidden_layers=3, sliding_window=WINDOW, attention_bias=True, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=500.0))),
    # Every third layer sees all keys and turns by other angles than those with a window.
    "gemma3": transformers.Gemma3TextConfig(**LLAMA | dict(
        num_hidden_layers=7, intermediate_size=20, sliding_window=WINDOW, sliding_window_pattern=3, query_pre_attn_scalar=4,
        tie_word_embeddings=True, rope_parameters=dict(full_attention=SCALED_ROPE, sliding_attention=NEAR_ROPE))),
    # Many gates and ups are beyond the limit.
    "gpt_oss": transformers.GptOssConfig(**LLAMA | dict(
        num_hidden_layers=3, intermediate_size=16, sliding_window=WINDOW, num_local_experts=6, num_experts_per_tok=2,
        swiglu_limit=0.4, swiglu_alpha=1.3, max_position_embeddings=2048, rope_parameters=UNROUNDED_ROPE)),
    "qwen3_next": transformers.Qwen3NextConfig(**HYBRID | dict(
        num_hidden_layers=3, layer_types=[LINEAR, FULL, LINEAR], num_experts=6, num_experts_per_tok=2, moe_intermediate_size=14,
        shared_expert_intermediate_size=22, mlp_only_layers=[1], output_router_logits=True, router_aux_loss_coef=0.1)),
    # Sequences of two chunks of the rule.
    "qwen3_5": transformers.Qwen3_5TextConfig(**HYBRID | dict(
        num_hidden_layers=3, layer_types=[LINEAR, LINEAR, FULL], linear_num_value_heads=2, linear_conv_kernel_dim=3,
        max_position_embeddings=128, tie_word_embeddings=True)),
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig(**without(HYBRID, "intermediate_size") | dict(
        layer_types=[FULL, LINEAR], linear_num_value_heads=6, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=14,
        shared_expert_intermediate_size=10, attention_bias=True)),
    "gpt_oss_mxfp4": transformers.GptOssConfig(**without(copy.deepcopy(PUBLISHED), "quantization_config")),
}


def load(folder, **changes):
    """The model of a Hugging Face folder, in f32 and with plain attention."""
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        changes["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                              local_files_only=True, **changes)
    # PyTorch's grouped products want rows of whole 16 bytes, which these widths are not. Dense models ignore it.
    model.config._experts_implementation = "eager"
    return model.train()


def middle(name, vector):
    """What the entries of a vector are drawn around."""
    if name.endswith("sinks"):
        return 1.5
    if not (name.endswith("weight") and ("norm" in name or ".ln_" in name)):
        return 0.0
    # Norms that start as 0 add 1. Where they are behind attention and MLP, and sublayers add as much as the residual has,
    # rounding grows from layer to layer.
    return 1.0 if vector.all() else -0.2 * (".post_" in name)


def write_random_model(config, folder):
    """A model without zeros or ones, so that biases and norms matter from the first step."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
            else:
                parameter.normal_(mean=middle(name, parameter), std=0.2)
        for _, bias in choice_biases(model):
            bias.normal_(std=0.2)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def random_batches(is_padded, seq=SEQ):
    """Token ids and targets, both [step][micro-batch][sample][position], and how many tokens of each sample are not padding,
    the fewest first: in that order the trainer reads them."""
    tokens = torch.randint(0, VOCAB, (STEPS, ACCUM, MICRO_BATCH, seq + 1))
    ids, targets = tokens[..., :-1].clone(), tokens[..., 1:].clone()
    share = torch.tensor(MASKED_SHARE).view(1, ACCUM, 1, 1)
    targets[torch.rand(targets.shape) < share] = MASKED
    lengths = torch.linspace(3 if is_padded else seq, seq, STEPS * ACCUM * MICRO_BATCH).long().view(ids.shape[:-1])
    if is_padded:
        # In a file of batches, padding is what follows a row's last target.
        last = torch.arange(seq) == lengths[..., None] - 1
        targets[last] = tokens[..., 1:][last]
        targets[~mask(lengths, seq)] = MASKED
    counts = (targets != MASKED).sum((2, 3))
    assert is_padded or (counts[:, 0] != counts[:, 1]).all(), "micro-batches have different numbers of targets"
    return ids, targets, lengths


def mask(lengths, seq):
    """True where a token is not padding."""
    return torch.arange(seq) < lengths[..., None]


def choice_biases(model):
    """The buffers that are added to scores where experts are chosen."""
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


# The module of experts, and the parts of gate and up and of the way down, in the files of a family; others have the last.
PARTS = dict(mixtral=("block_sparse_moe", ["w1", "w3"], ["w2"]))
OTHER_PARTS = ("mlp", ["gate_proj", "up_proj"], ["down_proj"])


def in_files(tensors, family):
    """Tensors under the names that files have. Those of experts are split into a matrix for each part of each, except in gpt-oss."""
    if family.startswith("gpt_oss"):
        return tensors
    module, *parts = PARTS.get(family.partition("_")[0], OTHER_PARTS)
    result = {}
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".mlp.experts.")
        if not layer:
            result[name.replace(".mlp.gate.", f".{module}.gate.")] = tensor
            continue
        of_last = parts[last == "down_proj"]
        for expert, matrix in enumerate(tensor):
            for part, rows in zip(of_last, matrix.chunk(len(of_last))):
                result[f"{layer}.{module}.experts.{expert}.{part}.weight"] = rows.clone()
    return result


def in_memory(tensors, family):
    """The inverse of `in_files`."""
    if family.startswith("gpt_oss"):
        return tensors
    module, *parts = PARTS.get(family.partition("_")[0], OTHER_PARTS)
    result, experts = {}, {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(f".{module}.experts.")
        if not rest:
            result[name.replace(f".{module}.gate.", ".mlp.gate.")] = tensor
            continue
        expert, part, _ = rest.split(".")
        last = "down_proj" if part in parts[1] else "gate_up_proj"
        experts.setdefault(f"{layer}.mlp.experts.{last}", {}).setdefault(int(expert), {})[part] = tensor
    for name, matrices in experts.items():
        of_last = parts[name.endswith("down_proj")]
        stacked = [torch.cat([matrices[expert][part] for part in of_last]) for expert in sorted(matrices)]
        result[name] = torch.stack(stacked)
    return result


def gradients(model):
    # An expert that no token went to has none.
    return {name: parameter.grad.clone() if parameter.grad is not None else torch.zeros_like(parameter)
            for name, parameter in model.named_parameters()}


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in [*model.named_parameters(), *choice_biases(model)]}


def balance(output, config):
    """What is added to a micro-batch's loss, and is within it already."""
    coefficient = getattr(config, "router_aux_loss_coef", 0.0) if getattr(config, "output_router_logits", False) else 0.0
    return coefficient * output.aux_loss if coefficient else None


def train(model, ids, targets, lengths):
    """Loss and gradient norm of every step, and the first step's gradients."""
    parameters = list(model.parameters())
    decay = {True: [], False: []}
    for name, parameter in model.named_parameters():
        # Biases of experts are of rank 2.
        decay[parameter.ndim >= 2 and not name.endswith("bias")].append(parameter)
    groups = [dict(params=decay[True], weight_decay=OPTIMIZER["weight_decay"]), dict(params=decay[False], weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, lr=OPTIMIZER["lr"], betas=OPTIMIZER["betas"], eps=OPTIMIZER["eps"])
    steps, first = [], None
    for index, (step_ids, step_targets, step_lengths) in enumerate(zip(ids, targets, lengths)):
        count, loss = int((step_targets != MASKED).sum()), 0.0
        for micro_ids, micro_targets, micro_lengths in zip(step_ids, step_targets, step_lengths):
            seen = mask(micro_lengths, micro_ids.shape[-1])
            # The targets are aligned with the ids already, so transformers must not shift them again.
            output = model(input_ids=micro_ids, labels=micro_targets, shift_labels=micro_targets, num_items_in_batch=count,
                           attention_mask=None if seen.all() else seen.long())
            added = balance(output, model.config)
            part = output.loss if added is None else output.loss - added
            (part if added is None else part + added / len(step_ids)).backward()
            loss += part.item()
        first = first or gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER["clip_grad_norm"]).item()
        adamw.step()
        adamw.zero_grad()
        steps.append(dict(step=index + 1, loss=loss, grad_norm=norm, target_tokens=count))
    return steps, first


def gradient_distance(found, expected):
    """The largest difference of any entry, relative to the largest entry of its tensor."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    return max(float((found[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in expected.items())


def transpose_square_c_proj(tensors):
    """The weights as an importer would read them that does not know GPT-2's [in, out] matrices. Only square ones are
    affected: the shapes of the others would stop it."""
    for name, tensor in tensors.items():
        if name.endswith("attn.c_proj.weight"):
            tensor.copy_(tensor.T.clone())
    return tensors


def broken_gpt2(folder, batches, right):
    """The steps with each of two mistakes."""
    erf = load(folder, activation_function="gelu")
    steps, first = train(erf, *batches)
    result = dict(gelu_erf=dict(steps=steps, gradient_distance=gradient_distance(first, right)))
    untransposed = load(folder)
    with torch.no_grad():
        transpose_square_c_proj(dict(untransposed.named_parameters()))
    steps, first = train(untransposed, *batches)
    # Such an importer would write its gradients without transposing, too.
    distance = gradient_distance(transpose_square_c_proj(first), right)
    return result | dict(c_proj_untransposed=dict(steps=steps, gradient_distance=distance))


def broken_window(folder, batches, right):
    """The steps with windows that are off by one."""
    result = {}
    for name, window in dict(one_key_more=WINDOW + 1, one_key_less=WINDOW - 1).items():
        steps, first = train(load(folder, sliding_window=window), *batches)
        result[name] = dict(steps=steps, gradient_distance=gradient_distance(first, right))
    return result


def broken_features(folder, batches, right):
    """The steps with a mistake that the family's features invite."""
    result = {}
    for name, mistake in MISTAKES[folder.name].items():
        model, undo = mistake(folder)
        steps, first = train(model, *batches)
        undo()
        result[name] = dict(steps=steps, gradient_distance=gradient_distance(first, right))
    return result


def setting(**changes):
    """The mistake of other settings than the folder's."""
    return lambda folder: (load(folder, **changes), lambda: None)


def unsquared(folder):
    model = load(folder)
    for layer in model.model.layers:
        plain = layer.self_attn.qk_head_dim ** -0.5
        layer.self_attn.scaling = plain * (layer.self_attn.scaling / plain) ** 0.5
    return model, lambda: None


def unnormed_queries(folder):
    model = load(folder)
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.forward = lambda latents: latents
    return model, lambda: None


def with_padding(folder):
    from transformers.models.mixtral import modeling_mixtral as module
    whole = module.load_balancing_loss_func
    module.load_balancing_loss_func = lambda logits, experts, choices, mask: whole(logits, experts, choices)
    return load(folder), lambda: setattr(module, "load_balancing_loss_func", whole)


def without_a_layer(folder):
    from transformers.models.qwen2_moe import modeling_qwen2_moe as module
    whole = module.load_balancing_loss_func
    module.load_balancing_loss_func = lambda logits, *rest: whole(logits[1:], *rest)
    return load(folder), lambda: setattr(module, "load_balancing_loss_func", whole)


def in_front(layer):
    """A layer's forward pass with its norms in front of attention and MLP instead of behind."""
    def forward(hidden, **settings):
        hidden = hidden + layer.self_attn(layer.post_attention_layernorm(hidden), **settings)[0]
        return hidden + layer.mlp(layer.post_feedforward_layernorm(hidden))
    return forward


def plain_norm(norm):
    """A norm's forward pass that multiplies by its weight instead of by 1 more."""
    return lambda rows: norm._norm(rows) * norm.weight


def norms_without_one(folder):
    model = load(folder)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = plain_norm(module)
    return model, lambda: None


def embeddings_not_scaled(folder):
    model = load(folder)
    model.model.embed_tokens.embed_scale.fill_(1.0)
    return model, lambda: None


def without_sinks(folder):
    from transformers.models.gpt_oss import modeling_gpt_oss as module
    from transformers.models.llama.modeling_llama import eager_attention_forward
    whole, module.eager_attention_forward = module.eager_attention_forward, eager_attention_forward
    return load(folder), lambda: setattr(module, "eager_attention_forward", whole)


def gates(rearranged):
    """The mistake of experts whose gates and ups lie in other columns."""
    def mistake(folder):
        model = load(folder)
        for experts in (layer.mlp.experts for layer in model.model.layers):
            experts._apply_gate = lambda columns, right=experts._apply_gate: right(rearranged(columns))
        return model, lambda: None
    return mistake


def softmax_before_top_k(folder):
    model = load(folder)
    for router in (layer.mlp.router for layer in model.model.layers):
        def forward(rows, router=router):
            logits = torch.nn.functional.linear(rows, router.weight, router.bias)
            return (logits, *logits.softmax(-1).topk(router.top_k))
        router.forward = forward
    return model, lambda: None


def norms_in_front(folder):
    model = load(folder)
    for layer in model.model.layers:
        layer.forward = in_front(layer)
    return model, lambda: None


def by_head(norm, width):
    """A norm's forward pass where every head has a root mean square of its own."""
    def forward(rows):
        heads = rows.unflatten(-1, (-1, width))
        return norm.weight * (heads * (heads.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()).flatten(-2)
    return forward


def norms_by_head(folder):
    model = load(folder)
    for attention in (layer.self_attn for layer in model.model.layers):
        for norm in (attention.q_norm, attention.k_norm):
            norm.forward = by_head(norm, attention.head_dim)
    return model, lambda: None


def one_state(module):
    """The mistake of a batch whose rows are one sequence to the gated delta rule: state goes from one to the next."""
    def mistake(folder):
        whole = module.torch_chunk_gated_delta_rule

        def leaking(*tensors, g, beta, **settings):
            rows = len(g)
            joined = [tensor.flatten(0, 1)[None] for tensor in (*tensors, g, beta)]
            out, state = whole(*joined[:-2], g=joined[-2], beta=joined[-1], **settings)
            return out[0].unflatten(0, (rows, -1)), state

        module.torch_chunk_gated_delta_rule = leaking
        return load(folder), lambda: setattr(module, "torch_chunk_gated_delta_rule", whole)
    return mistake


def flat_split(folder):
    """The projections read as if files had all queries first, then all keys, values and gates."""
    model = load(folder)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            mixer = layer.linear_attn
            heads, group = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
            keys, values = mixer.head_k_dim, group * mixer.head_v_dim
            for linear, widths in ((mixer.in_proj_qkvz, [keys, keys, values, values]), (mixer.in_proj_ba, [group, group])):
                parts = linear.weight.data.split([heads * width for width in widths])
                by_head = [part.unflatten(0, (heads, -1)) for part in parts]
                linear.weight.data = torch.cat(by_head, 1).flatten(0, 1).contiguous()
    return model, lambda: None


def gated_norm_with_one(folder):
    """The norm behind the gated delta rule with 1 more than its weight, as the model's other norms."""
    model = load(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("linear_attn.norm.weight"):
                parameter += 1.0
    return model, lambda: None


MISTAKES = dict(
    mixtral_padded=dict(balance_of_padding=with_padding),
    qwen2_moe=dict(softmax_after_top_k=setting(norm_topk_prob=True), balance_without_a_layer=without_a_layer),
    deepseek_v2=dict(mscale_not_squared=unsquared), deepseek_v3=dict(rotation_by_halves=setting(rope_interleave=False)),
    deepseek_v2_queries=dict(latents_not_normed=unnormed_queries), deepseek_v3_yarn=dict(mscale_not_squared=unsquared),
    smollm3=dict(every_layer_turned=setting(no_rope_layers=[1] * 5)),
    glm4_moe=dict(whole_heads_turned=setting(rope_parameters=ROPE | dict(partial_rotary_factor=1.0))),
    granite=dict(
        embeddings_not_multiplied=setting(embedding_multiplier=1.0), residuals_not_multiplied=setting(residual_multiplier=1.0),
        logits_not_scaled=setting(logits_scaling=1.0),
        scores_by_width=setting(attention_multiplier=LLAMA["head_dim"] ** -0.5)),
    olmo2=dict(norms_in_front=norms_in_front, norms_by_head=norms_by_head),
    olmo3=dict(one_rotation=setting(rope_parameters=dict(full_attention=YARN_ROPE, sliding_attention=YARN_ROPE))),
    ministral3=dict(no_temperature=setting(rope_parameters=TEMPERATURE_ROPE | dict(llama_4_scaling_beta=0.0))),
    gemma2=dict(
        norms_without_one=norms_without_one, embeddings_not_scaled=embeddings_not_scaled,
        scores_not_capped=setting(attn_logit_softcapping=None), logits_not_capped=setting(final_logit_softcapping=None),
        scores_by_width=setting(query_pre_attn_scalar=LLAMA["head_dim"]), gelu_erf=setting(hidden_activation="gelu"),
        windows_in_other_layers=setting(layer_types=["full_attention", "sliding_attention", "full_attention"])),
    gemma3=dict(
        norms_without_one=norms_without_one, embeddings_not_scaled=embeddings_not_scaled,
        scores_by_width=setting(query_pre_attn_scalar=LLAMA["head_dim"]), gelu_erf=setting(hidden_activation="gelu"),
        one_rotation=setting(rope_parameters=dict(full_attention=SCALED_ROPE, sliding_attention=SCALED_ROPE)),
        nothing_scaled=setting(rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=500.0), sliding_attention=NEAR_ROPE))),
    gpt_oss=dict(
        no_sinks=without_sinks, nothing_clamped=setting(swiglu_limit=1e9), other_sigmoid=setting(swiglu_alpha=1.702),
        gate_and_up_swapped=gates(lambda columns: columns.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)),
        gate_before_up=gates(lambda columns: columns.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)),
        softmax_before_top_k=softmax_before_top_k,
        ramp_rounded=setting(rope_parameters=UNROUNDED_ROPE | dict(truncate=True)),
        windows_in_other_layers=setting(layer_types=["full_attention", "sliding_attention", "full_attention"])),
    qwen3_next=dict(
        flat_split=flat_split, norms_without_one=norms_without_one, state_leaks=one_state(modeling_qwen3_next),
        weights_not_normed=setting(norm_topk_prob=False)),
    qwen3_5=dict(
        state_leaks=one_state(modeling_qwen3_5), gated_norm_with_one=gated_norm_with_one,
        whole_heads_turned=setting(rope_parameters=NEAR_ROPE | dict(partial_rotary_factor=1.0))),
    phi3_long=dict(long_factors=setting(rope_parameters=LONG_ROPE | dict(
        short_factor=LONG_ROPE["long_factor"], original_max_position_embeddings=64))))


def write_reference(family, folder):
    folder.mkdir(parents=True)
    torch.manual_seed(SEED)
    write_random_model(CONFIGS[family], folder)
    if family.endswith("mxfp4"):
        mxfp4.quantise_experts(folder, PUBLISHED)
    is_padded = family.endswith("padded")
    seq = LONGER_SEQ.get(family, SEQ)
    batches = ids, targets, lengths = random_batches(is_padded, seq)
    model = load(folder)
    steps, first = train(model, *batches)
    save_file(in_files(first, family), folder / "grads_step0.safetensors")
    save_file(in_files(weights(model), family), folder / "model_final.safetensors")
    rows = dict(input_ids=ids, targets=targets)
    save_file({name: tensor.reshape(-1, seq).to(torch.int32).contiguous() for name, tensor in rows.items()},
              folder / "batches.safetensors")
    reference = dict(
        made_with=f"transformers {transformers.__version__}, torch {torch.__version__}, CPU f32", seed=SEED,
        optimizer=OPTIMIZER, micro_batch=MICRO_BATCH, accum=ACCUM, seq=seq,
        loss="mean over the step's unmasked targets; grad_norm is before clipping; targets are inputs shifted by one; -100 = masked",
        input_ids=ids.tolist(), targets=targets.tolist(), steps=steps)
    if is_padded:
        reference["lengths"] = lengths.tolist()
    broken = dict(gpt2=broken_gpt2, mistral_window=broken_window) | dict.fromkeys(MISTAKES, broken_features)
    if family in broken:
        reference["broken"] = broken[family](folder, batches, first)
    (folder / "reference.json").write_text(json.dumps(reference) + "\n")
    return steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--families", nargs="+", default=list(CONFIGS), choices=CONFIGS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for family in arguments.families:
        steps = write_reference(family, arguments.out / family)
        print(family, *(f"{step['loss']:.4f}" for step in steps), flush=True)


if __name__ == "__main__":
    main()
