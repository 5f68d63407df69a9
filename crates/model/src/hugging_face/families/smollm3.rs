//! SmolLM3: layers without a rotary embedding, which alone have a window if there is one.

use super::decoder::Assumed;
use super::{Description, SavedAs, decoder, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope;
use serde_json::{Value, json};

pub(super) const FAMILY: Description =
    Description::new(["smollm3", "SmolLM3ForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(4),
    tied: true,
    rope: rope::AssumedRope {
        theta: 2e6,
        ..rope::AssumedRope::LLAMA
    },
    ..Assumed::LLAMA
};

const TURNS: &str = "no_rope_layers";

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_experts()?;
    let config = decoder::read(keys, &ASSUMED)?;
    let still = layers_that_do_not_turn(keys, config.layers)?;
    let has_windows = keys.flag_or("use_sliding_window", false)?;
    let window = windows::size(keys, None)?.filter(|_| has_windows);
    let full = match windows::full_layers(keys, config.layers, has_windows)? {
        Some(full) => full,
        None => {
            let layers = 0..config.layers;
            layers.filter(|layer| !still.contains(layer)).collect()
        }
    };
    let config = ModelConfig {
        mlp_bias: keys.flag_or("mlp_bias", false)?,
        no_rope_layers: still,
        ..decoder::with_attention_bias(keys, config)?
    };
    Ok(windows::with(config, window, full))
}

/// Layers without a rotary embedding have 0 in the list; without it, they are every so many.
fn layers_that_do_not_turn(keys: &Keys, layers: usize) -> Result<Vec<usize>, HfConfigError> {
    let listed = 0..layers;
    if keys.is_null(TURNS) {
        const INTERVAL: &str = "no_rope_layer_interval";
        let interval = keys.size_or(INTERVAL, 4)?;
        keys.refuse(INTERVAL, interval == 0)?;
        return Ok(listed
            .filter(|layer| (layer + 1).is_multiple_of(interval))
            .collect());
    }
    let turns = keys.get(TURNS).as_array();
    let turns = turns.filter(|turns| turns.len() >= layers && !turns.is_empty());
    let expected = HfConfigError::Key(TURNS, "a list with 0 or 1 for each layer");
    let turns = turns.ok_or(expected)?;
    match turns.iter().all(|turns| *turns == 0 || *turns == 1) {
        true => Ok(listed.filter(|layer| turns[*layer] == 0).collect()),
        false => Err(HfConfigError::Unsupported(
            TURNS,
            keys.get(TURNS).to_string(),
        )),
    }
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    let turns = (0..config.layers).map(|layer| config.turns(layer) as u8);
    json["mlp_bias"] = json!(config.mlp_bias);
    json[TURNS] = turns.collect();
    json["use_sliding_window"] = json!(config.sliding_window.is_some());
    json["sliding_window"] = json!(config.sliding_window);
    json["layer_types"] = windows::types(config);
    json
}
