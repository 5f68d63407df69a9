//! GLM-4.5, 4.6 and 4.7: half of each head is turned, and experts are those of DeepSeek-V3.

use super::decoder::Assumed;
use super::latent::{AssumedExperts, PREDICTORS};
use super::{Description, SavedAs, decoder, deepseek_v3, experts, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope;
use serde_json::{Value, json};

pub(super) const FAMILY: Description = Description {
    aliases: &[
        ("num_local_experts", "n_routed_experts"),
        (PREDICTORS[1], PREDICTORS[0]),
    ],
    ..Description::new(["glm4_moe", "Glm4MoeForCausalLM"], read, write)
};

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(8),
    norm_eps: 1e-5,
    rope: rope::AssumedRope {
        share: Some(0.5),
        ..rope::AssumedRope::LLAMA
    },
    ..Assumed::LLAMA
};

const EXPERTS: AssumedExperts = AssumedExperts {
    count: 128,
    chosen: 8,
    ffn: 1408,
    shared: 1,
    factor: 1.0,
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_mlp_bias()?;
    windows::refuse_types(keys)?;
    let config = decoder::read(keys, &ASSUMED)?;
    let first = keys.size_or("first_k_dense_replace", 1)?;
    let dense_layers = windows::first_layers(first, config.layers);
    let experts = deepseek_v3::experts_by_sigmoid(keys, &EXPERTS, dense_layers, [1, 1])?;
    Ok(ModelConfig {
        qkv_bias: keys.flag_or("attention_bias", false)?,
        qk_norm: keys.flag_or("use_qk_norm", false)?,
        experts: Some(experts),
        ..config
    })
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    json["attention_bias"] = json!(config.qkv_bias);
    json["use_qk_norm"] = json!(config.qk_norm);
    json["partial_rotary_factor"] = json!(config.rotary_share);
    deepseek_v3::write_experts_by_sigmoid(&experts::of(config), &mut json);
    json
}
