//! The special tokens that a tokenizer's configuration names, such as `eos_token`.

use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Token texts by role: `bos_token`, `eos_token`, `pad_token` and whatever else ends in `_token`.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpecialTokens(pub(crate) BTreeMap<String, String>);

impl SpecialTokens {
    /// Adds those of `tokenizer_config.json` or `special_tokens_map.json`; what is there already stays.
    pub(crate) fn add(&mut self, config: &Map<String, Value>) {
        for (role, token) in config.iter().filter(|(role, _)| role.ends_with("_token")) {
            // Written as text, or as an object with its flags.
            let text = token.as_str().or_else(|| token.get("content")?.as_str());
            if let Some(text) = text {
                self.0.entry(role.clone()).or_insert_with(|| text.into());
            }
        }
    }

    pub(crate) fn get(&self, role: &str) -> Option<&str> {
        self.0.get(role).map(String::as_str)
    }
}
