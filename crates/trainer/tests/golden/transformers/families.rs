//! The models here that transformers trained, for the tests of every crate.

/// A folder beside this file each.
pub const FAMILIES: [&str; 20] = [
    "llama",
    "llama3",
    "llama_biases",
    "llama_yarn",
    "qwen2",
    "qwen2_window",
    "qwen3",
    "qwen3_window",
    "mistral",
    "mistral_window",
    "phi3",
    "gpt2",
    "mixtral",
    "mixtral_padded",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v2_queries",
    "deepseek_v3_yarn",
];
