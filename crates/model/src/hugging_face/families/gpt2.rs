//! GPT-2's `config.json`, whose keys are its own.

use super::{Description, SavedAs};
use crate::ModelConfig;
use crate::features::{ActivationFunction, NormKind, PositionKind};
use crate::hugging_face::keys::{HfConfigError, Keys};
use serde_json::{Value, json};

pub(super) const FAMILY: Description = Description {
    aliases: &[
        ("hidden_size", "n_embd"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
        ("max_position_embeddings", "n_positions"),
    ],
    ..Description::new(["gpt2", "GPT2LMHeadModel"], read, write)
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    refuse_unsupported(keys)?;
    let (hidden, heads) = (keys.size("n_embd")?, keys.size("n_head")?);
    if heads > 0 && !hidden.is_multiple_of(heads) {
        return Err(HfConfigError::Key("n_head", "a divisor of `n_embd`"));
    }
    Ok(ModelConfig {
        hidden,
        layers: keys.size("n_layer")?,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads.max(1),
        ffn: keys.size_or("n_inner", hidden.saturating_mul(4))?,
        vocab: keys.size("vocab_size")?,
        tie_embeddings: true,
        norm: NormKind::Layer,
        activation: ActivationFunction::GeluTanh,
        positions: PositionKind::Learned,
        max_positions: Some(keys.size("n_positions")?),
        biases: true,
        dropout: dropout(keys)?,
        norm_eps: keys.number_or("layer_norm_epsilon", 1e-5)?,
        init_std: keys.number_or("initializer_range", 0.02)?,
        ..ModelConfig::PLAIN
    })
}

/// GPT-2 has three rates of dropout; they must be equal here.
fn dropout(keys: &Keys) -> Result<f64, HfConfigError> {
    let rate = |key| keys.number_or(key, 0.1);
    let [embedding, attention, residual] = ["embd_pdrop", "attn_pdrop", "resid_pdrop"].map(rate);
    let (embedding, attention, residual) = (embedding?, attention?, residual?);
    if embedding != attention || attention != residual {
        let rates = format!(
            "{embedding}, attn_pdrop {attention}, resid_pdrop {residual}: one rate for all"
        );
        return Err(HfConfigError::Unsupported("embd_pdrop", rates));
    }
    Ok(residual)
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    json!({
        "n_embd": config.hidden,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.ffn,
        "vocab_size": config.vocab,
        "n_positions": config.max_positions,
        "n_ctx": config.max_positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": null,
        "eos_token_id": null,
        "torch_dtype": saved.dtype,
    })
}

/// Features that the forward pass does not have.
fn refuse_unsupported(keys: &Keys) -> Result<(), HfConfigError> {
    for key in [
        "scale_attn_by_inverse_layer_idx",
        "reorder_and_upcast_attn",
        "add_cross_attention",
    ] {
        keys.refuse(key, *keys.get(key) == true)?;
    }
    let is_tied = keys.flag_or("tie_word_embeddings", true)?;
    keys.refuse("tie_word_embeddings", !is_tied)?;
    keys.refuse(
        "scale_attn_weights",
        *keys.get("scale_attn_weights") == false,
    )?;
    match keys.get("activation_function").as_str() {
        None | Some("gelu_new" | "gelu_pytorch_tanh") => Ok(()),
        Some(other) => {
            let name = format!("{other}; it knows gelu_new, the tanh form");
            Err(HfConfigError::Unsupported("activation_function", name))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::DType;

    const GPT2: &str = r#"{"model_type": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 3, "vocab_size": 29,
        "n_positions": 16, "n_inner": null, "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1,
        "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02}"#;

    #[test]
    fn what_is_written_is_read_again() {
        let config = ModelConfig::from_hf(GPT2).unwrap();
        assert_eq!((config.ffn, config.head_dim, config.dropout), (48, 4, 0.1));
        assert!(config.tie_embeddings && config.biases);
        let text = config.to_hf(8, DType::F32);
        assert_eq!(ModelConfig::from_hf(&text).unwrap(), config);
    }

    /// The names of other families are those of transformers' attribute map, and win there.
    #[test]
    fn sizes_under_the_names_of_other_families_count() {
        let keys = r#""hidden_size": 48, "max_position_embeddings": 32, "num_attention_heads": 6, "num_hidden_layers": 4,
            "vocab_size""#;
        let config = ModelConfig::from_hf(&GPT2.replace("\"vocab_size\"", keys)).unwrap();
        let sizes = (config.hidden, config.heads, config.layers);
        assert_eq!((sizes, config.max_positions), ((48, 6, 4), Some(32)));
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let on = |key: &str| format!("\"{key}\": true, \"n_embd\"");
        let cases = [
            (
                "\"n_embd\"",
                on("scale_attn_by_inverse_layer_idx"),
                "scale_attn_by_inverse_layer_idx",
            ),
            (
                "\"n_embd\"",
                on("reorder_and_upcast_attn"),
                "reorder_and_upcast_attn",
            ),
            (
                "\"n_embd\"",
                on("add_cross_attention"),
                "add_cross_attention",
            ),
            (
                "\"n_embd\"",
                "\"tie_word_embeddings\": false, \"n_embd\"".into(),
                "`tie_word_embeddings` = false",
            ),
            ("gelu_new", "relu".into(), "`activation_function` = relu"),
            (
                "\"attn_pdrop\": 0.1",
                "\"attn_pdrop\": 0.2".into(),
                "attn_pdrop 0.2",
            ),
            (
                "\"n_head\": 3",
                "\"n_head\": 5".into(),
                "`n_head` is missing or is not a divisor of `n_embd`",
            ),
            (
                "\"n_positions\": 16, ",
                String::new(),
                "`n_positions` is missing",
            ),
        ];
        for (given, replaced, expected) in cases {
            let text = GPT2.replacen(given, &replaced, 1);
            assert_ne!(text, GPT2);
            let message = ModelConfig::from_hf(&text).unwrap_err().to_string();
            assert!(message.contains(expected), "{expected}: {message}");
        }
    }
}
