//! Qwen2-MoE: experts beside a shared one behind a gate, and biases of q, k and v.

use super::decoder::Assumed;
use super::{Description, SavedAs, decoder, experts, windows};
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::{ExpertsConfig, ModelConfig};
use serde_json::{Value, json};

pub(super) const FAMILY: Description =
    Description::new(["qwen2_moe", "Qwen2MoeForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(16),
    ..Assumed::LLAMA
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_mlp_bias()?;
    windows::refuse_types(keys)?;
    windows::refuse_used(keys)?;
    let config = decoder::read(keys, &ASSUMED)?;
    let experts = ExpertsConfig {
        shared_ffn: keys.size_or("shared_expert_intermediate_size", 5632)?,
        shared_gate: true,
        ..experts::qwen(keys, [60, 4, 1408], config.layers)?
    };
    Ok(ModelConfig {
        qkv_bias: *keys.get("qkv_bias") != false,
        experts: Some(experts),
        router_aux: experts::aux(keys)?,
        ..config
    })
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let experts = experts::of(config);
    let mut json = decoder::write(config, saved);
    experts::write_qwen(config, &experts, &mut json);
    json["shared_expert_intermediate_size"] = json!(experts.shared_ffn);
    json["qkv_bias"] = json!(config.qkv_bias);
    json
}
