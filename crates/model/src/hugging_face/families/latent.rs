//! The keys of latent attention and of DeepSeek's experts.

use super::{SavedAs, decoder, windows};
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope;
use crate::{ExpertsConfig, LatentConfig, ModelConfig};
use serde_json::{Value, json};

/// Names of the key for extra prediction layers. We skip these layers and write 0, since transformers assumes one. Newer
/// files have the second name.
pub(in crate::hugging_face) const PREDICTORS: [&str; 2] =
    ["num_nextn_predict_layers", "num_mtp_layers"];

/// What the class assumes of experts' keys.
pub(super) struct AssumedExperts {
    pub(super) count: usize,
    pub(super) chosen: usize,
    pub(super) ffn: usize,
    pub(super) shared: usize,
    pub(super) factor: f64,
}

/// What the class assumes of latent attention's widths.
pub(super) struct AssumedWidths {
    pub(super) kv: usize,
    pub(super) q: usize,
    pub(super) own: usize,
    pub(super) rotary: usize,
    pub(super) value: usize,
}

impl AssumedWidths {
    /// What DeepSeek's classes assume.
    pub(super) const DEEPSEEK: AssumedWidths = AssumedWidths {
        kv: 512,
        q: 1536,
        own: 128,
        rotary: 64,
        value: 128,
    };
}

/// A model with latent attention, without its experts.
pub(super) fn read(
    keys: &Keys,
    (assumed, widths): (&decoder::Assumed, &AssumedWidths),
    neighbours: bool,
) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_mlp_bias()?;
    windows::refuse_types(keys)?;
    windows::refuse_used(keys)?;
    keys.refuse("attention_bias", keys.flag_or("attention_bias", false)?)?;
    let config =
        decoder::read_with_scores_of_latents(keys, assumed, rope::read(keys, &assumed.rope)?)?;
    let latent = LatentConfig {
        kv: keys.size_or("kv_lora_rank", widths.kv)?,
        q: match keys.is_missing("q_lora_rank") {
            true => Some(widths.q),
            false => keys.optional_size("q_lora_rank")?,
        },
        rotary_dim: keys.size_or("qk_rope_head_dim", widths.rotary)?,
        v_head_dim: keys.size_or("v_head_dim", widths.value)?,
        neighbours,
    };
    let own = keys.size_or("qk_nope_head_dim", widths.own)?;
    Ok(ModelConfig {
        head_dim: own.saturating_add(latent.rotary_dim),
        latent: Some(latent),
        ..config
    })
}

/// What is common to experts of DeepSeek-V2 and V3.
pub(super) fn experts(
    keys: &Keys,
    assumed: &AssumedExperts,
    dense_layers: Vec<usize>,
) -> Result<ExpertsConfig, HfConfigError> {
    let every = keys.number_or("moe_layer_freq", 1.0)? == 1.0;
    keys.refuse("moe_layer_freq", !every)?;
    let ffn = keys.size_or("moe_intermediate_size", assumed.ffn)?;
    let sizes = [
        keys.size_or("n_routed_experts", assumed.count)?,
        keys.size_or("num_experts_per_tok", assumed.chosen)?,
        ffn,
    ];
    let shared = keys.size_or("n_shared_experts", assumed.shared)?;
    Ok(ExpertsConfig {
        shared_ffn: ffn.saturating_mul(shared),
        dense_layers,
        factor: keys.number_or("routed_scaling_factor", assumed.factor)?,
        ..ExpertsConfig::plain(sizes)
    })
}

/// Writes experts, without what V2 and V3 write differently.
pub(super) fn write_experts(experts: &ExpertsConfig, json: &mut Value) {
    json["num_experts_per_tok"] = json!(experts.chosen);
    json["n_routed_experts"] = json!(experts.count);
    json["moe_intermediate_size"] = json!(experts.ffn);
    json["n_shared_experts"] = json!(experts.shared_ffn / experts.ffn.max(1));
    json["first_k_dense_replace"] = json!(experts.dense_layers.len());
    json["moe_layer_freq"] = json!(1);
    json["norm_topk_prob"] = json!(experts.normed);
    json["routed_scaling_factor"] = json!(experts.factor);
}

/// The keys of a model with latent attention, without its experts.
pub(super) fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    let Some(latent) = &config.latent else {
        return json;
    };
    json["kv_lora_rank"] = json!(latent.kv);
    json["q_lora_rank"] = json!(latent.q);
    json["qk_rope_head_dim"] = json!(latent.rotary_dim);
    json["qk_nope_head_dim"] = json!(config.head_dim.saturating_sub(latent.rotary_dim));
    json["v_head_dim"] = json!(latent.v_head_dim);
    json["head_dim"] = json!(latent.rotary_dim);
    json
}
