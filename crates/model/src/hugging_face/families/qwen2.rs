//! Qwen2: q, k and v have biases.

use super::decoder::Assumed;
use super::{Description, SavedAs, decoder, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope;
use serde_json::{Value, json};

pub(super) const FAMILY: Description = Description::new(["qwen2", "Qwen2ForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(32),
    ..Assumed::LLAMA
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_experts()?;
    keys.refuse_mlp_bias()?;
    let config = ModelConfig {
        qkv_bias: true,
        ..decoder::read(keys, &ASSUMED)?
    };
    windows::read_qwen(keys, config)
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    json["attention_bias"] = json!(true);
    windows::write_qwen(config, &mut json);
    if config.sliding_window.is_none() {
        // transformers has defaults for these keys; other readers have none.
        json["use_sliding_window"] = json!(false);
        json["sliding_window"] = json!(rope::max_position(config, saved.seq));
        json["max_window_layers"] = json!(config.layers);
    }
    json
}
