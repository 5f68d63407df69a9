//! Keys of a `config.json`, one value at a time, and what can be wrong with them.

use crate::ModelConfigError;
use serde_json::Value;

/// What is wrong with a `config.json`.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum HfConfigError {
    /// Not JSON.
    #[error("it is not valid JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// A key is missing or has the wrong type.
    #[error("`{0}` is missing or is not {1}")]
    Key(&'static str, &'static str),
    /// Another architecture.
    #[error(
        "model_type `{0}` is not supported; this trainer knows llama, mistral, qwen2, qwen3, phi3, mixtral, qwen2_moe, \
         qwen3_moe, deepseek_v2, deepseek_v3 and gpt2"
    )]
    Family(String),
    /// A known model type with another head than the language model's, or with none.
    #[error(
        "architectures has `{found}`, which is not supported; a {family} model is trained as {known}"
    )]
    Architecture {
        found: String,
        family: String,
        known: &'static str,
    },
    /// A feature that would change the arithmetic.
    #[error("`{0}` = {1} is not supported")]
    Unsupported(&'static str, String),
    /// Weights that are quantised in a way that is not read.
    #[error(
        "`quantization_config`: weights {0} are not read; give the folder with the model in bf16 or f32"
    )]
    Quantised(String),
    /// The sizes make no model.
    #[error(transparent)]
    Config(#[from] ModelConfigError),
}

/// The known model types, each with its class that has the language model's head.
const ARCHITECTURES: [(&str, &str); 11] = [
    ("llama", "LlamaForCausalLM"),
    ("mistral", "MistralForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("phi3", "Phi3ForCausalLM"),
    ("mixtral", "MixtralForCausalLM"),
    ("qwen2_moe", "Qwen2MoeForCausalLM"),
    ("qwen3_moe", "Qwen3MoeForCausalLM"),
    ("deepseek_v2", "DeepseekV2ForCausalLM"),
    ("deepseek_v3", "DeepseekV3ForCausalLM"),
    ("gpt2", "GPT2LMHeadModel"),
];

/// Names of transformers' attribute maps, by family: the first stands for the second, and wins where a file has both.
const ALIASES: [(&str, &str, &str); 8] = [
    ("mixtral", "num_experts", "num_local_experts"),
    ("qwen3_moe", "num_local_experts", "num_experts"),
    ("deepseek_v2", "num_experts", "n_routed_experts"),
    ("deepseek_v3", "num_local_experts", "n_routed_experts"),
    ("gpt2", "hidden_size", "n_embd"),
    ("gpt2", "num_hidden_layers", "n_layer"),
    ("gpt2", "num_attention_heads", "n_head"),
    ("gpt2", "max_position_embeddings", "n_positions"),
];

/// The same file with each value under the one name by which it is read here.
pub(super) fn without_aliases(mut json: Value, family: &str) -> Value {
    for (_, alias, key) in ALIASES.iter().filter(|(of, ..)| *of == family) {
        if !json[*alias].is_null() {
            json[*key] = json[*alias].take();
        }
    }
    json
}

/// A model type's class that has the language model's head, if the type is known.
pub(super) fn causal_lm(family: &str) -> Option<&'static str> {
    let known = ARCHITECTURES.iter().find(|(name, _)| *name == family);
    known.map(|(_, class)| *class)
}

/// A number that may be left out.
pub(super) fn number(json: &Value, key: &'static str) -> Result<Option<f64>, HfConfigError> {
    match &json[key] {
        Value::Null => Ok(None),
        value => value
            .as_f64()
            .map(Some)
            .ok_or(HfConfigError::Key(key, "a number")),
    }
}

/// A whole number.
pub(super) fn size(json: &Value, key: &'static str) -> Result<usize, HfConfigError> {
    let size = json[key].as_u64().map(|size| size as usize);
    size.ok_or(HfConfigError::Key(key, "a positive whole number"))
}

/// A whole number that may be left out.
pub(super) fn size_or(json: &Value, key: &'static str, or: usize) -> Result<usize, HfConfigError> {
    match json[key].is_null() {
        true => Ok(or),
        false => size(json, key),
    }
}

/// A switch that may be left out.
pub(super) fn flag(json: &Value, key: &'static str) -> Result<bool, HfConfigError> {
    match &json[key] {
        Value::Null => Ok(false),
        value => value
            .as_bool()
            .ok_or(HfConfigError::Key(key, "true or false")),
    }
}
