//! OLMo 3: OLMo 2 with windows in most layers, which have a rotary embedding of their own.

use super::decoder::Assumed;
use super::{Description, SavedAs, decoder, olmo2, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope::{self, Rope};
use serde_json::{Value, json};

pub(super) const FAMILY: Description = Description::new(["olmo3", "Olmo3ForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    norm_eps: 1e-5,
    rope: rope::AssumedRope {
        theta: 5e5,
        ..rope::AssumedRope::LLAMA
    },
    ..Assumed::LLAMA
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    let [of_full, of_window] = rope::read_by_kind(keys, &ASSUMED.rope)?;
    let config = decoder::read_with(keys, &ASSUMED, of_full.clone())?;
    let config = olmo2::blocks(keys, config)?;
    let full = match windows::full_layers(keys, config.layers, true)? {
        Some(full) => full,
        None => {
            let layers = 0..config.layers;
            layers
                .filter(|layer| (layer + 1).is_multiple_of(4))
                .collect()
        }
    };
    let window = windows::size(keys, Some(windows::ASSUMED))?;
    let needs_window = window.is_none() && full.len() < config.layers;
    keys.refuse("sliding_window", needs_window)?;
    let is_stretched = of_window.scaling.is_some() && of_window != of_full;
    keys.refuse("rope_parameters", is_stretched && !full.is_empty())?;
    Ok(with_window_rope(
        windows::with(config, window, full),
        &of_full,
        of_window,
    ))
}

/// The same model where layers with a window have this rotary embedding.
fn with_window_rope(config: ModelConfig, of_full: &Rope, of_window: Rope) -> ModelConfig {
    match config.sliding_window {
        None => config,
        Some(_) if of_window == *of_full => config,
        Some(_) if config.full_attention_layers.is_empty() => ModelConfig {
            rope_theta: of_window.theta,
            rope_scaling: of_window.scaling,
            ..config
        },
        Some(_) => ModelConfig {
            window_rope_theta: Some(of_window.theta),
            ..config
        },
    }
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    rope::write_by_kind(config, &mut json);
    // transformers refuses null if a layer has a window, and does not read the key if none has.
    json["sliding_window"] = json!(config.sliding_window);
    json["layer_types"] = windows::types(config);
    json
}
