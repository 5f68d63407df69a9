//! Granite: four multipliers.

use super::decoder::Assumed;
use super::{Description, SavedAs, decoder, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use serde_json::{Value, json};

pub(super) const FAMILY: Description =
    Description::new(["granite", "GraniteForCausalLM"], read, write);

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_experts()?;
    windows::refuse_types(keys)?;
    // transformers refuses it too.
    let is_null = !keys.is_missing("attention_multiplier") && keys.is_null("attention_multiplier");
    keys.refuse("attention_multiplier", is_null)?;
    let config = decoder::read(keys, &Assumed::LLAMA)?;
    Ok(ModelConfig {
        mlp_bias: keys.flag_or("mlp_bias", false)?,
        embedding_multiplier: keys.number_or("embedding_multiplier", 1.0)?,
        residual_multiplier: keys.number_or("residual_multiplier", 1.0)?,
        attention_multiplier: Some(keys.number_or("attention_multiplier", 1.0)?),
        logits_scaling: keys.number_or("logits_scaling", 1.0)?,
        ..decoder::with_attention_bias(keys, config)?
    })
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    json["mlp_bias"] = json!(config.mlp_bias);
    json["embedding_multiplier"] = json!(config.embedding_multiplier);
    json["residual_multiplier"] = json!(config.residual_multiplier);
    let by_width = (config.head_dim as f64).sqrt().recip();
    json["attention_multiplier"] = json!(config.attention_multiplier.unwrap_or(by_width));
    json["logits_scaling"] = json!(config.logits_scaling);
    json
}
