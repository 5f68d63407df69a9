//! Qwen3-MoE: Qwen3 with experts.

use super::decoder::Assumed;
use super::{Description, ExpertNames, SavedAs, decoder, experts, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use serde_json::Value;

pub(super) const FAMILY: Description = Description {
    model_type: "qwen3_moe",
    class: "Qwen3MoeForCausalLM",
    aliases: &[("num_local_experts", "num_experts")],
    experts: ExpertNames::USUAL,
    read,
    write,
};

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(4),
    ..Assumed::LLAMA
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_mlp_bias()?;
    windows::refuse_types(keys)?;
    keys.refuse(
        "use_sliding_window",
        *keys.get("use_sliding_window") == true,
    )?;
    let has_bias = keys.flag_or("attention_bias", false)?;
    let config = decoder::read(keys, &ASSUMED)?;
    Ok(ModelConfig {
        qkv_bias: has_bias,
        o_bias: has_bias,
        qk_norm: true,
        experts: Some(experts::qwen(keys, [128, 8, 768], config.layers)?),
        router_aux: experts::aux(keys)?,
        ..config
    })
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    experts::write_qwen(config, &experts::of(config), &mut json);
    json
}
