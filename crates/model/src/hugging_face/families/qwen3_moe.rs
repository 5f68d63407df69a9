//! Qwen3-MoE: Qwen3 with experts.

use super::decoder::Assumed;
use super::{Description, SavedAs, decoder, experts, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use serde_json::Value;

pub(super) const FAMILY: Description = Description {
    aliases: &[("num_local_experts", "num_experts")],
    ..Description::new(["qwen3_moe", "Qwen3MoeForCausalLM"], read, write)
};

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(4),
    ..Assumed::LLAMA
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_mlp_bias()?;
    windows::refuse_types(keys)?;
    windows::refuse_used(keys)?;
    let config = decoder::read(keys, &ASSUMED)?;
    Ok(ModelConfig {
        qk_norm: true,
        experts: Some(experts::qwen(keys, [128, 8, 768], config.layers)?),
        router_aux: experts::aux(keys)?,
        ..decoder::with_attention_bias(keys, config)?
    })
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    experts::write_qwen(config, &experts::of(config), &mut json);
    json
}
