//! The complete named runs of `configs/`, compiled in.

use super::error::ConfigError;
use super::unknown::nearest_name;
use crate::Result;

/// Names the preset's file in `configs/` and includes it.
macro_rules! presets {
    ($($name:literal),+ $(,)?) => {
        &[$(($name, include_str!(concat!("../../../configs/", $name, ".toml")))),+]
    };
}

/// Presets by name, the default first, with their text.
const PRESETS: &[(&str, &str)] = presets![
    "tiny",
    "tiny-moe",
    "tiny-mla",
    "llama-15m",
    "llama-3.2-1b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.1-405b",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
    "smollm3-3b",
    "granite-4.1-3b",
    "olmo-3-7b",
    "ministral-3-8b",
    "phi-4-mini",
    "glm-4.5-air",
    "glm-4.7-flash",
    "gemma-3-270m",
    "gemma-3-1b",
    "gemma-3-4b",
    "gemma-3-12b",
    "gemma-3-27b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "qwen3.5-0.8b",
    "qwen3.5-2b",
    "qwen3.5-4b",
    "qwen3.5-9b",
    "qwen3.5-27b",
    "qwen3.5-35b-a3b",
    "qwen3-next-80b-a3b",
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
];

/// The preset of a run that names none.
pub const DEFAULT: &str = "tiny";

/// The names of all presets.
pub fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}

/// The text of the preset called `name`.
///
/// # Errors
/// No preset has that name; the error names the nearest.
pub fn text(name: &str) -> Result<&'static str> {
    PRESETS
        .iter()
        .find(|(preset, _)| *preset == name)
        .map(|(_, text)| *text)
        .ok_or_else(|| ConfigError::UnknownPreset {
            name: name.to_owned(),
            nearest: nearest_name(&name.to_lowercase(), names()),
        })
}

/// The list of presets for `--help`.
pub fn help() -> String {
    let names = names().collect::<Vec<_>>().join(", ");
    format!("Presets for --config: {names}")
}
