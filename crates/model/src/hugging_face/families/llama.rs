//! Llama.

use super::decoder::Assumed;
use super::{Description, SavedAs, decoder, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use serde_json::{Value, json};

pub(super) const FAMILY: Description = Description::new(["llama", "LlamaForCausalLM"], read, write);

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_experts()?;
    windows::refuse_types(keys)?;
    let config = decoder::read(keys, &Assumed::LLAMA)?;
    Ok(ModelConfig {
        mlp_bias: keys.flag_or("mlp_bias", false)?,
        ..decoder::with_attention_bias(keys, config)?
    })
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    if config.mlp_bias {
        json["mlp_bias"] = json!(true);
    }
    json
}
