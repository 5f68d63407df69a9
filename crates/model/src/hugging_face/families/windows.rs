//! Windows of attention, by layer.

use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope::{FULL, Rope, SLIDING};
use serde_json::{Value, json};
use std::collections::HashSet;

/// The window that most classes assume for a file that does not mention one.
pub(super) const ASSUMED: usize = 4096;

/// How many of the first layers have no window if a file of Qwen does not say.
const FIRST_FULL_LAYERS: usize = 28;

/// The size of the window. Null means none; only a key that is missing has the assumed size.
pub(super) fn size(keys: &Keys, assumed: Option<usize>) -> Result<Option<usize>, HfConfigError> {
    keys.optional_size_or("sliding_window", assumed)
}

/// Refuses layers with a window in a family whose class ignores `layer_types`: such a file describes another model.
pub(super) fn refuse_types(keys: &Keys) -> Result<(), HfConfigError> {
    let mut types = keys.get("layer_types").as_array().into_iter().flatten();
    keys.refuse("layer_types", types.any(|kind| *kind != FULL))
}

/// Refuses windows in a family that has none here.
pub(super) fn refuse_used(keys: &Keys) -> Result<(), HfConfigError> {
    const KEY: &str = "use_sliding_window";
    keys.refuse(KEY, *keys.get(KEY) == true)
}

/// The same model with a window in the layers that are not `full`.
pub(super) fn with(config: ModelConfig, window: Option<usize>, full: Vec<usize>) -> ModelConfig {
    let (sliding_window, full_attention_layers) = match window {
        Some(window) if full.len() < config.layers => (Some(window), full),
        _ => (None, Vec::new()),
    };
    ModelConfig {
        sliding_window,
        full_attention_layers,
        ..config
    }
}

/// The layers without a window by `layer_types`, if the file has them.
pub(super) fn full_layers(
    keys: &Keys,
    layers: usize,
    has_windows: bool,
) -> Result<Option<Vec<usize>>, HfConfigError> {
    const KEY: &str = "layer_types";
    if keys.is_null(KEY) {
        return Ok(None);
    }
    let types = keys
        .get(KEY)
        .as_array()
        .filter(|types| types.len() == layers);
    let types = types.ok_or(HfConfigError::Key(KEY, "a name for each layer"))?;
    let known = |kind: &&Value| **kind == FULL || (**kind == SLIDING && has_windows);
    match types.iter().find(|kind| !known(kind)) {
        Some(other) => Err(HfConfigError::Unsupported(KEY, other.to_string())),
        None => Ok(Some(
            (0..layers).filter(|layer| types[*layer] == FULL).collect(),
        )),
    }
}

/// The same model with the window of the file, or else the assumed one: in the layers that `layer_types` says, or else in all but every
/// `pattern`th.
pub(super) fn read_by_pattern(
    keys: &Keys,
    config: ModelConfig,
    (assumed, pattern): (usize, usize),
) -> Result<ModelConfig, HfConfigError> {
    let is_full = |layer: &usize| pattern > 0 && (layer + 1).is_multiple_of(pattern);
    let full = full_layers(keys, config.layers, true)?;
    let full = full.unwrap_or_else(|| (0..config.layers).filter(is_full).collect());
    let window = size(keys, Some(assumed))?;
    let needs_window = window.is_none() && full.len() < config.layers;
    keys.refuse("sliding_window", needs_window)?;
    Ok(with(config, window, full))
}

/// Writes the window and the type of each layer.
pub(super) fn write_by_pattern(config: &ModelConfig, json: &mut Value) {
    // transformers refuses null if a layer has a window, and does not read the key if none has.
    json["sliding_window"] = json!(config.sliding_window);
    json["layer_types"] = types(config);
}

/// The same model where layers with a window have this rotary embedding, and others that of the model.
pub(super) fn with_rope(
    keys: &Keys,
    config: ModelConfig,
    of_full: &Rope,
    of_window: Rope,
) -> Result<ModelConfig, HfConfigError> {
    let is_stretched = of_window.scaling.is_some() && of_window != *of_full;
    let has_both = !config.full_attention_layers.is_empty();
    keys.refuse("rope_parameters", is_stretched && has_both)?;
    Ok(match config.sliding_window {
        None => config,
        Some(_) if of_window == *of_full => config,
        Some(_) if !has_both => ModelConfig {
            rope_theta: of_window.theta,
            rope_scaling: of_window.scaling,
            ..config
        },
        Some(_) => ModelConfig {
            window_rope_theta: Some(of_window.theta),
            ..config
        },
    })
}

/// Layers before `count`.
pub(super) fn first_layers(count: usize, layers: usize) -> Vec<usize> {
    (0..count.min(layers)).collect()
}

/// Reads Qwen's windows: if the file uses them, by `layer_types`, or from layer `max_window_layers` on.
pub(super) fn read_qwen(keys: &Keys, config: ModelConfig) -> Result<ModelConfig, HfConfigError> {
    let is_used = keys.flag_or("use_sliding_window", false)?;
    let full = match full_layers(keys, config.layers, is_used)? {
        Some(full) => full,
        None => {
            let first = keys.size_or("max_window_layers", FIRST_FULL_LAYERS)?;
            first_layers(first, config.layers)
        }
    };
    let window = size(keys, Some(ASSUMED))?;
    Ok(with(config, window.filter(|_| is_used), full))
}

/// Writes Qwen's windows: the type of each layer and, for readers that ignore types, how many layers come before the first
/// with a window.
pub(super) fn write_qwen(config: &ModelConfig, json: &mut Value) {
    let Some(window) = config.sliding_window else {
        return;
    };
    let layers = 0..config.layers;
    let before = layers.take_while(|layer| config.window(*layer).is_none());
    json["sliding_window"] = json!(window);
    json["use_sliding_window"] = json!(true);
    json["max_window_layers"] = json!(before.count());
    json["layer_types"] = types(config);
}

/// The type of each layer.
pub(super) fn types(config: &ModelConfig) -> Value {
    let full: HashSet<usize> = config.full_attention_layers.iter().copied().collect();
    let has_window = |layer| config.sliding_window.is_some() && !full.contains(&layer);
    let layers = 0..config.layers;
    layers
        .map(|layer| if has_window(layer) { SLIDING } else { FULL })
        .collect()
}
