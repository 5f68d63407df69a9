//! Small models with experts.

use super::{hybrid, odd_model};
use model::{
    ActivationFunction, DeltaConfig, ExpertsConfig, LatentConfig, ModelConfig, RouterAuxKind,
    ScoreKind,
};

/// Their layers.
pub const LAYERS: usize = 3;

/// Qwen2-MoE: a gate for its shared expert, biases, a dense layer between, transformers' loss of balance and one by the
/// size of logits.
pub fn qwen() -> ModelConfig {
    ModelConfig {
        qkv_bias: true,
        router_aux: 0.05,
        router_z_loss: 0.01,
        experts: Some(ExpertsConfig {
            shared_ffn: 44,
            shared_gate: true,
            dense_layers: vec![1],
            normed: false,
            ..ExpertsConfig::plain([5, 2, 36])
        }),
        ..odd_model(LAYERS)
    }
}

/// DeepSeek-V3: latents, groups of experts, biases of choices, and a loss of balance by sequence.
pub fn deepseek() -> ModelConfig {
    ModelConfig {
        kv_heads: 3,
        router_aux: 0.05,
        router_aux_kind: RouterAuxKind::Sequence,
        experts: Some(ExpertsConfig {
            shared_ffn: 72,
            dense_layers: vec![0],
            score: ScoreKind::Sigmoid,
            factor: 2.5,
            groups: 3,
            chosen_groups: 2,
            choice_bias: true,
            ..ExpertsConfig::plain([6, 3, 36])
        }),
        latent: Some(LatentConfig {
            kv: 28,
            q: Some(44),
            rotary_dim: 8,
            v_head_dim: 12,
            neighbours: true,
        }),
        ..odd_model(LAYERS)
    }
}

/// gpt-oss: sinks, windows in every other layer, and experts with biases whose gates are clamped.
pub fn gpt_oss() -> ModelConfig {
    ModelConfig {
        qkv_bias: true,
        o_bias: true,
        attention_sinks: true,
        sliding_window: Some(9),
        full_attention_layers: vec![1],
        activation: ActivationFunction::ClampedSwiglu,
        swiglu_limit: 0.5,
        router_aux: 0.05,
        experts: Some(ExpertsConfig {
            biases: true,
            ..ExpertsConfig::plain([5, 2, 36])
        }),
        ..odd_model(LAYERS)
    }
}

/// Qwen3-Next: layers of the gated delta rule, whose files have projections by key head, around one of attention with a gate.
pub fn qwen_next() -> ModelConfig {
    let delta = hybrid(LAYERS).delta;
    ModelConfig {
        router_aux: 0.05,
        experts: Some(ExpertsConfig {
            shared_ffn: 44,
            shared_gate: true,
            ..ExpertsConfig::plain([5, 2, 36])
        }),
        delta: delta.map(|delta| DeltaConfig {
            by_key_head: true,
            ..delta
        }),
        ..hybrid(LAYERS)
    }
}

/// All, with their names.
pub fn models() -> [(&'static str, ModelConfig); 4] {
    [
        ("Qwen2-MoE", qwen()),
        ("DeepSeek-V3", deepseek()),
        ("gpt-oss", gpt_oss()),
        ("Qwen3-Next", qwen_next()),
    ]
}
