//! Llama.

use super::decoder::Assumed;
use super::{Description, ExpertNames, SavedAs, decoder, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use serde_json::{Value, json};

pub(super) const FAMILY: Description = Description {
    model_type: "llama",
    class: "LlamaForCausalLM",
    aliases: &[],
    experts: ExpertNames::USUAL,
    read,
    write,
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_experts()?;
    windows::refuse_types(keys)?;
    let has_bias = keys.flag_or("attention_bias", false)?;
    Ok(ModelConfig {
        qkv_bias: has_bias,
        o_bias: has_bias,
        mlp_bias: keys.flag_or("mlp_bias", false)?,
        ..decoder::read(keys, &Assumed::LLAMA)?
    })
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    if config.mlp_bias {
        json["mlp_bias"] = json!(true);
    }
    json
}
