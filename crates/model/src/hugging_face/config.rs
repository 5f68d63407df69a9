//! `config.json` as Hugging Face writes it.

use super::gpt2;
use crate::config::{ActivationFunction, NormKind, Positions};
use crate::{ConfigError, Family, ModelConfig, RopeScaling};
use memory::DType;
use serde_json::{Value, json};

/// A `config.json` that describes no model of this family.
#[derive(Debug, thiserror::Error)]
pub enum HfConfigError {
    /// Not JSON.
    #[error("it is not valid JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// A key is missing or has the wrong type.
    #[error("`{0}` is missing or is not {1}")]
    Key(&'static str, &'static str),
    /// Another architecture.
    #[error(
        "model_type `{0}` is not supported; this trainer knows llama, mistral (without a sliding window), qwen2, qwen3 and gpt2"
    )]
    Family(String),
    /// The same blocks under another head, or none.
    #[error(
        "architectures has `{found}`, which is not supported; a {family} model is trained as {known}"
    )]
    Architecture {
        /// What the file says.
        found: String,
        /// The model type.
        family: String,
        /// What it would have to say.
        known: &'static str,
    },
    /// A feature that would change the arithmetic.
    #[error("`{0}` = {1} is not supported")]
    Unsupported(&'static str, String),
    /// The sizes make no model.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl ModelConfig {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// [`HfConfigError`] that names the key.
    pub fn from_hf(text: &str) -> Result<ModelConfig, HfConfigError> {
        let json: Value = serde_json::from_str(text)?;
        let family = json["model_type"]
            .as_str()
            .ok_or(HfConfigError::Key("model_type", "a string"))?;
        check_architecture(&json, family)?;
        let config = match family {
            "gpt2" => gpt2::read(&json)?,
            _ => read_llama(&json, family)?,
        };
        config.validate()?;
        Ok(config)
    }

    /// The text of a `config.json` for a model made here, trained on sequences of `seq` tokens, with weights of `dtype`.
    pub fn to_hf(&self, seq: usize, dtype: DType) -> String {
        let json = match self.family() {
            Family::Llama => write_llama(self, seq, dtype_name(dtype)),
            Family::Gpt2 => gpt2::write(self, dtype_name(dtype)),
        };
        format!("{json:#}\n")
    }
}

/// What Hugging Face calls a type of weights.
pub(super) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F32 => "float32",
        other => panic!("weights are written in f32 or bf16, not in {other:?}"),
    }
}

/// The model types that are known, with the one class of each that has the language model's head.
const ARCHITECTURES: [(&str, &str); 5] = [
    ("llama", "LlamaForCausalLM"),
    ("mistral", "MistralForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("gpt2", "GPT2LMHeadModel"),
];

/// Refuses model types, and heads, that are not known.
fn check_architecture(json: &Value, family: &str) -> Result<(), HfConfigError> {
    let known = ARCHITECTURES.iter().find(|(name, _)| *name == family);
    let (_, known) = known.ok_or_else(|| HfConfigError::Family(family.into()))?;
    let named = match &json["architectures"] {
        Value::Null => return Ok(()),
        named => named.as_array(),
    };
    let named = named.ok_or(HfConfigError::Key("architectures", "a list of names"))?;
    match named.iter().find(|name| *name != known) {
        None => Ok(()),
        Some(other) => Err(HfConfigError::Architecture {
            found: other.as_str().map_or(other.to_string(), Into::into),
            family: family.into(),
            known,
        }),
    }
}

/// The positions that the file promises: transformers complains about scaling that ends below them.
fn max_position(config: &ModelConfig, seq: usize) -> usize {
    let scaled = config.rope_scaling.as_ref().map(|scaling| {
        // A cast of what is too large gives the largest.
        (scaling.original_max_position as f64 * scaling.factor).round() as usize
    });
    scaled.unwrap_or(0).max(seq)
}

/// The shape that Llama's keys say, and those of its like.
fn read_llama(json: &Value, family: &str) -> Result<ModelConfig, HfConfigError> {
    refuse_unsupported(json)?;
    let size = |key: &'static str| {
        json[key]
            .as_u64()
            .map(|size| size as usize)
            .ok_or(HfConfigError::Key(key, "a positive whole number"))
    };
    let (hidden, heads) = (size("hidden_size")?, size("num_attention_heads")?);
    Ok(ModelConfig {
        hidden,
        layers: size("num_hidden_layers")?,
        heads,
        kv_heads: if json["num_key_value_heads"].is_null() {
            heads
        } else {
            size("num_key_value_heads")?
        },
        head_dim: match (json["head_dim"].is_null(), family) {
            (false, _) => size("head_dim")?,
            (true, "qwen3") => 128,
            (true, _) => hidden / heads.max(1),
        },
        ffn: size("intermediate_size")?,
        vocab: size("vocab_size")?,
        tie_embeddings: flag(json, "tie_word_embeddings")?,
        qkv_bias: family == "qwen2" || flag(json, "attention_bias")?,
        qk_norm: family == "qwen3",
        norm: NormKind::Rms,
        activation: ActivationFunction::Swiglu,
        positions: Positions::Rotary,
        max_positions: None,
        biases: false,
        dropout: 0.0,
        norm_eps: number(json, "rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta: rope_theta(json)?,
        rope_scaling: rope_scaling(json)?,
        init_std: number(json, "initializer_range")?.unwrap_or(0.02),
    })
}

/// Llama's keys for this shape, or those of its like.
fn write_llama(config: &ModelConfig, seq: usize, dtype: &str) -> Value {
    let (family, architecture) = match (config.qk_norm, config.qkv_bias) {
        (true, _) => ("qwen3", "Qwen3ForCausalLM"),
        (false, true) => ("qwen2", "Qwen2ForCausalLM"),
        (false, false) => ("llama", "LlamaForCausalLM"),
    };
    let rope_scaling = config.rope_scaling.as_ref().map(|scaling| {
        json!({
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        })
    });
    let mut json = json!({
        "architectures": [architecture],
        "model_type": family,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "max_position_embeddings": max_position(config, seq),
        "bos_token_id": null,
        "eos_token_id": null,
        "torch_dtype": dtype,
    });
    if family == "qwen2" {
        // transformers has defaults for these, other readers have none.
        json["use_sliding_window"] = json!(false);
        json["sliding_window"] = json!(max_position(config, seq));
        json["max_window_layers"] = json!(config.layers);
    }
    json
}

/// Features that the forward pass does not have.
fn refuse_unsupported(json: &Value) -> Result<(), HfConfigError> {
    type IsRefused = fn(&Value) -> bool;
    let refused: [(&'static str, IsRefused); 7] = [
        ("hidden_act", |value| !(value.is_null() || value == "silu")),
        ("mlp_bias", |value| value == true),
        ("attention_dropout", |value| {
            value.as_f64().is_some_and(|rate| rate > 0.0)
        }),
        ("use_sliding_window", |value| value == true),
        ("num_experts", |value| {
            value.as_u64().is_some_and(|experts| experts > 1)
        }),
        ("quantization_config", |value| !value.is_null()),
        ("layer_types", |value| {
            let mut kinds = value.as_array().into_iter().flatten();
            kinds.any(|kind| kind != "full_attention")
        }),
    ];
    if let Some((key, _)) = refused.iter().find(|(key, wrong)| wrong(&json[*key])) {
        return Err(HfConfigError::Unsupported(key, json[*key].to_string()));
    }
    let window = &json["sliding_window"];
    if json["model_type"] == "mistral" && !window.is_null() {
        return Err(HfConfigError::Unsupported(
            "sliding_window",
            window.to_string(),
        ));
    }
    Ok(())
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

/// A switch that may be left out.
pub(super) fn flag(json: &Value, key: &'static str) -> Result<bool, HfConfigError> {
    match &json[key] {
        Value::Null => Ok(false),
        value => value
            .as_bool()
            .ok_or(HfConfigError::Key(key, "true or false")),
    }
}

/// Newer files keep the base in `rope_parameters`.
fn rope_theta(json: &Value) -> Result<f64, HfConfigError> {
    let given = match number(json, "rope_theta")? {
        None => number(&json["rope_parameters"], "rope_theta")?,
        given => given,
    };
    Ok(given.unwrap_or(10_000.0))
}

fn rope_scaling(json: &Value) -> Result<Option<RopeScaling>, HfConfigError> {
    let newer = &json["rope_parameters"];
    let scaling = if json["rope_scaling"].is_null() {
        newer
    } else {
        &json["rope_scaling"]
    };
    let kind = scaling["rope_type"].as_str().or(scaling["type"].as_str());
    match kind {
        None | Some("default") => Ok(None),
        Some("llama3") => {
            let number = |key: &'static str| {
                scaling[key]
                    .as_f64()
                    .ok_or(HfConfigError::Key(key, "a number"))
            };
            Ok(Some(RopeScaling {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position: number("original_max_position_embeddings")? as usize,
            }))
        }
        Some(other) => Err(HfConfigError::Unsupported("rope_scaling", other.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 20, "intermediate_size": 100, "vocab_size": 131, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": true, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}"#;

    #[test]
    fn what_is_written_is_read_again() {
        let config = ModelConfig::from_hf(LLAMA).unwrap();
        assert_eq!(
            (config.q_width(), config.kv_width(), config.tie_embeddings),
            (60, 20, true)
        );
        assert_eq!(
            ModelConfig::from_hf(&config.to_hf(64, DType::F32)).unwrap(),
            config
        );
        let qwen2 = ModelConfig {
            qkv_bias: true,
            rope_scaling: None,
            ..config.clone()
        };
        assert_eq!(
            ModelConfig::from_hf(&qwen2.to_hf(64, DType::F32)).unwrap(),
            qwen2
        );
        let qwen3 = ModelConfig {
            qk_norm: true,
            rope_scaling: None,
            ..config
        };
        assert_eq!(
            ModelConfig::from_hf(&qwen3.to_hf(64, DType::F32)).unwrap(),
            qwen3
        );
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let cases = [
            ("llama\"", "bloom\"", "model_type `bloom`"),
            (
                "\"head_dim\": 20",
                "\"architectures\": [\"LlamaForSequenceClassification\"]",
                "`LlamaForSequenceClassification`, which is not supported; a llama model is trained as LlamaForCausalLM",
            ),
            (
                "\"head_dim\": 20",
                "\"architectures\": \"LlamaForCausalLM\"",
                "`architectures` is missing or is not a list of names",
            ),
            (
                "\"head_dim\": 20",
                "\"quantization_config\": {\"bits\": 4}",
                "`quantization_config` = {\"bits\":4}",
            ),
            (
                "\"head_dim\": 20",
                "\"layer_types\": [\"full_attention\", \"sliding_attention\"]",
                "`layer_types` = ",
            ),
            (
                "\"vocab_size\": 131",
                "\"vocab_size\": 18446744073709551615",
                "more than 2^48",
            ),
            (
                "\"num_hidden_layers\": 3",
                "\"num_hidden_layers\": 18446744073709551615",
                "model.layers = 18446744073709551615",
            ),
            (
                "\"vocab_size\": 131",
                "\"vocab\": 1",
                "`vocab_size` is missing",
            ),
            (
                "\"rope_type\": \"llama3\"",
                "\"rope_type\": \"yarn\"",
                "`rope_scaling` = yarn",
            ),
            ("\"head_dim\": 20", "\"head_dim\": 21", "odd"),
            (
                "\"head_dim\": 20",
                "\"mlp_bias\": true",
                "`mlp_bias` = true",
            ),
        ];
        for (from, to, expected) in cases {
            let message = ModelConfig::from_hf(&LLAMA.replacen(from, to, 1))
                .unwrap_err()
                .to_string();
            assert!(message.contains(expected), "{message}");
        }
        assert!(ModelConfig::from_hf("{").is_err());
    }
}
