//! Gemma 2: soft caps of scores and logits, and windows in every other layer.

use super::decoder::Assumed;
use super::{Description, SavedAs, gemma};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope;
use serde_json::{Value, json};

pub(super) const FAMILY: Description =
    Description::new(["gemma2", "Gemma2ForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    vocab: Some(256_000),
    ..gemma::ASSUMED
};

const CAP: &str = "attn_logit_softcapping";

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    let rope = rope::read(keys, &ASSUMED.rope)?;
    Ok(ModelConfig {
        attn_logit_softcapping: keys.optional_number_or(CAP, Some(50.0))?,
        ..gemma::read(keys, (&ASSUMED, rope), (2, Some(30.0)))?
    })
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = gemma::write(config, saved);
    json[CAP] = json!(config.attn_logit_softcapping);
    json
}
