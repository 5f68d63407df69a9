//! Qwen3: queries and keys are normalised, a head at a time.

use super::decoder::Assumed;
use super::{Description, SavedAs, decoder, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use serde_json::Value;

pub(super) const FAMILY: Description = Description::new(["qwen3", "Qwen3ForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(32),
    head_dim: Some(128),
    ..Assumed::LLAMA
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_experts()?;
    keys.refuse_mlp_bias()?;
    let config = ModelConfig {
        qk_norm: true,
        ..decoder::with_attention_bias(keys, decoder::read(keys, &ASSUMED)?)?
    };
    windows::read_qwen(keys, config)
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    windows::write_qwen(config, &mut json);
    json
}
