//! What Qwen3-Next and Qwen3.5 have alike: layers with the gated delta rule, three of four, beside attention with a gate, a quarter of
//! whose heads turns.

use super::decoder::{self, Assumed};
use super::{SavedAs, experts};
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope::{AssumedRope, FULL};
use crate::{DeltaConfig, ExpertsConfig, ModelConfig};
use serde_json::{Value, json};

pub(super) const ASSUMED: Assumed = Assumed {
    heads: Some(16),
    head_dim: Some(256),
    rope: AssumedRope {
        share: Some(0.25),
        ..AssumedRope::LLAMA
    },
    ..Assumed::LLAMA
};

/// Transformers' name of layers with the gated delta rule.
const LINEAR: &str = "linear_attention";

/// The model of such a file; `by_key_head`: files have the projections of the gated delta rule as one matrix.
pub(super) fn read(
    keys: &Keys,
    assumed: &Assumed,
    by_key_head: bool,
) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_mlp_bias()?;
    let config = decoder::with_attention_bias(keys, decoder::read(keys, assumed)?)?;
    let attention_layers = attention_layers(keys, config.layers)?;
    let delta = DeltaConfig {
        key_heads: keys.size_or("linear_num_key_heads", 16)?,
        value_heads: keys.size_or("linear_num_value_heads", 32)?,
        key_head_dim: keys.size_or("linear_key_head_dim", 128)?,
        value_head_dim: keys.size_or("linear_value_head_dim", 128)?,
        conv_width: keys.size_or("linear_conv_kernel_dim", 4)?,
        attention_layers,
        by_key_head,
    };
    Ok(ModelConfig {
        qk_norm: true,
        zero_centered_norm: true,
        attention_gate: true,
        delta: (delta.attention_layers.len() < config.layers).then_some(delta),
        ..config
    })
}

/// The layers with attention: by `layer_types`, or else every fourth, or as often as the file says.
fn attention_layers(keys: &Keys, layers: usize) -> Result<Vec<usize>, HfConfigError> {
    const KEY: &str = "layer_types";
    const INTERVAL: &str = "full_attention_interval";
    if keys.is_null(KEY) {
        let interval = keys.size_or(INTERVAL, 4)?;
        if interval == 0 {
            return Err(HfConfigError::Key(INTERVAL, "a whole number above 0"));
        }
        let has_attention = |layer: &usize| (layer + 1).is_multiple_of(interval);
        return Ok((0..layers).filter(has_attention).collect());
    }
    let types = keys.get(KEY).as_array();
    let types = types.filter(|types| types.len() == layers);
    let types = types.ok_or(HfConfigError::Key(KEY, "a name for each layer"))?;
    let mut unknown = types
        .iter()
        .filter(|kind| **kind != FULL && **kind != LINEAR);
    match unknown.next() {
        Some(other) => Err(HfConfigError::Unsupported(KEY, other.to_string())),
        None => Ok((0..layers).filter(|layer| types[*layer] == FULL).collect()),
    }
}

/// The keys of such a model.
pub(super) fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    json["partial_rotary_factor"] = json!(config.rotary_share);
    let kind = |layer| {
        if config.has_delta(layer) {
            LINEAR
        } else {
            FULL
        }
    };
    json["layer_types"] = (0..config.layers).map(kind).collect();
    if let Some(delta) = &config.delta {
        json["linear_num_key_heads"] = json!(delta.key_heads);
        json["linear_num_value_heads"] = json!(delta.value_heads);
        json["linear_key_head_dim"] = json!(delta.key_head_dim);
        json["linear_value_head_dim"] = json!(delta.value_head_dim);
        json["linear_conv_kernel_dim"] = json!(delta.conv_width);
    }
    json
}

/// Experts beside a shared one behind a gate; those of a file that does not say are `assumed`.
pub(super) fn experts(
    keys: &Keys,
    assumed: [usize; 3],
    layers: usize,
) -> Result<ExpertsConfig, HfConfigError> {
    Ok(ExpertsConfig {
        shared_ffn: keys.size_or("shared_expert_intermediate_size", 512)?,
        shared_gate: true,
        ..experts::qwen(keys, assumed, layers)?
    })
}

/// Writes them.
pub(super) fn write_experts(config: &ModelConfig, json: &mut Value) {
    let experts = experts::of(config);
    experts::write_qwen(config, &experts, json);
    json["shared_expert_intermediate_size"] = json!(experts.shared_ffn);
}
