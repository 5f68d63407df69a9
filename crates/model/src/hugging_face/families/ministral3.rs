//! Ministral 3: Mistral with queries whose temperature grows with the position. Folders with pictures have it as their text
//! part.

use super::decoder::Assumed;
use super::{Description, SavedAs, decoder, windows};
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope;
use crate::{ModelConfig, RopeScaling};
use serde_json::{Value, json};

pub(super) const FAMILY: Description =
    Description::new(["ministral3", "Ministral3ForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(8),
    head_dim: Some(128),
    norm_eps: 1e-5,
    ..Assumed::LLAMA
};

const BETA: &str = "llama_4_scaling_beta";

/// The rotary embedding that the class has for a file without one.
fn assumed_rope() -> Value {
    json!({
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1,
    })
}

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_experts()?;
    keys.refuse_mlp_bias()?;
    windows::refuse_types(keys)?;
    let json = rope::with_assumed(keys, assumed_rope())?;
    let keys = Keys(&json);
    let config = ModelConfig {
        query_temperature: Some(rope::required(&keys, BETA)?),
        ..decoder::read(&keys, &ASSUMED)?
    };
    let original = config
        .rope_scaling
        .as_ref()
        .and_then(RopeScaling::original_max_position);
    if original.is_none() {
        let original = "original_max_position_embeddings";
        return Err(HfConfigError::Key(
            original,
            "there beside a rope_type that has one",
        ));
    }
    Ok(windows::with(
        config,
        windows::size(&keys, None)?,
        Vec::new(),
    ))
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    json["sliding_window"] = json!(config.sliding_window);
    if let Some(beta) = config.query_temperature {
        json["rope_scaling"][BETA] = json!(beta);
    }
    json
}
