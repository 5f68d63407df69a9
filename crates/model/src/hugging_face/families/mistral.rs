//! Mistral: Llama with a window in all layers, or in none.

use super::decoder::Assumed;
use super::{Description, SavedAs, decoder, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use serde_json::{Value, json};

pub(super) const FAMILY: Description =
    Description::new(["mistral", "MistralForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(8),
    ..Assumed::LLAMA
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_experts()?;
    keys.refuse_mlp_bias()?;
    windows::refuse_types(keys)?;
    let config = decoder::read(keys, &ASSUMED)?;
    let window = windows::size(keys, Some(windows::ASSUMED))?;
    Ok(windows::with(config, window, Vec::new()))
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    json["sliding_window"] = json!(config.sliding_window);
    json
}
