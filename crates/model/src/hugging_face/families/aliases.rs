//! Names under which transformers has the computation of a family here. Each was compared with its family: random weights,
//! equal logits in f64; but for Kimi K2, whose code is not in transformers. What is saved keeps the name that came.

use super::{Description, deepseek_v3, glm4_moe, qwen2};
use crate::hugging_face::keys::{HfConfigError, Keys, check_architecture};
use serde_json::{Value, json};

struct Alias {
    model_type: &'static str,
    class: &'static str,
    family: &'static Description,
    /// The keys that the family needs instead of the file's. What its class does not have is refused.
    keys: fn(&Keys) -> Result<Value, HfConfigError>,
    /// What the class assumes of keys that are missing, where the family's assumes something else.
    assumed: fn() -> Value,
}

const ALIASES: [Alias; 4] = [
    Alias {
        model_type: "seed_oss",
        class: "SeedOssForCausalLM",
        family: &qwen2::FAMILY,
        keys: seed_oss,
        assumed: || json!({"num_key_value_heads": 8, "head_dim": 128}),
    },
    Alias {
        model_type: "kimi_k2",
        class: "DeepseekV3ForCausalLM",
        family: &deepseek_v3::FAMILY,
        keys: |_| Ok(json!({})),
        assumed: || json!({}),
    },
    Alias {
        model_type: "dots1",
        class: "Dots1ForCausalLM",
        family: &glm4_moe::FAMILY,
        keys: dots1,
        assumed: || json!({"num_key_value_heads": 32, "first_k_dense_replace": 0, "rms_norm_eps": 1e-6}),
    },
    Alias {
        model_type: "solar_open",
        class: "SolarOpenForCausalLM",
        family: &glm4_moe::FAMILY,
        keys: solar_open,
        assumed: || json!({"partial_rotary_factor": 1.0, "head_dim": 128, "moe_intermediate_size": 1280, "rope_theta": 1e6}),
    },
];

/// The names that are read beside those of families.
pub(in crate::hugging_face) fn names() -> impl Iterator<Item = &'static str> {
    ALIASES.iter().map(|alias| alias.model_type)
}

/// The keys of a file as its family has them.
///
/// # Errors
/// [`HfConfigError`] if the class is another, or has what the family lacks.
pub(in crate::hugging_face) fn of_family(mut json: Value) -> Result<Value, HfConfigError> {
    let mut aliases = ALIASES.iter();
    let Some(alias) = aliases.find(|alias| json["model_type"] == alias.model_type) else {
        return Ok(json);
    };
    check_architecture(&json, alias.model_type, alias.class)?;
    let keys = (alias.keys)(&Keys(&json))?;
    for (key, value) in (alias.assumed)().as_object().into_iter().flatten() {
        if json.get(key).is_none() {
            json[key] = value.clone();
        }
    }
    for (key, value) in keys.as_object().into_iter().flatten() {
        json[key] = value.clone();
    }
    json["model_type"] = alias.family.model_type.into();
    json["architectures"] = vec![alias.family.class].into();
    Ok(json)
}

/// Biases of q, k and v alone, as published; dropout is applied to residuals too.
fn seed_oss(keys: &Keys) -> Result<Value, HfConfigError> {
    keys.refuse("attention_bias", !keys.flag_or("attention_bias", true)?)?;
    keys.refuse(
        "attention_out_bias",
        keys.flag_or("attention_out_bias", false)?,
    )?;
    keys.refuse(
        "residual_dropout",
        keys.number_or("residual_dropout", 0.1)? > 0.0,
    )?;
    keys.refuse(
        "attention_dropout",
        keys.number_or("attention_dropout", 0.1)? > 0.0,
    )?;
    Ok(json!({"use_sliding_window": false}))
}

/// Without windows, which published files do not have; they name the router's way by another key than DeepSeek's.
fn dots1(keys: &Keys) -> Result<Value, HfConfigError> {
    keys.refuse("attention_bias", keys.flag_or("attention_bias", false)?)?;
    let windows_from = keys.size_or("max_window_layers", 62)?;
    let has_window = keys.is_missing("sliding_window") || !keys.is_null("sliding_window");
    let has_types = !keys.is_null("layer_types");
    let layers = keys.size("num_hidden_layers")?;
    keys.refuse(
        "max_window_layers",
        has_window && !has_types && windows_from < layers,
    )?;
    let whole =
        ["rope_parameters", "rope_scaling"].map(|rope| &keys.get(rope)["partial_rotary_factor"]);
    let whole = whole.into_iter().chain([keys.get("partial_rotary_factor")]);
    let is_part = whole.filter_map(Value::as_f64).any(|share| share != 1.0);
    keys.refuse("partial_rotary_factor", is_part)?;
    keys.size("n_routed_experts")?;
    keys.size("num_experts_per_tok")?;
    keys.size("n_shared_experts")?;
    keys.refuse_other("scoring_func", &["noaux_tc"])?;
    Ok(json!({
        "use_qk_norm": true,
        "partial_rotary_factor": 1.0,
        "norm_topk_prob": keys.flag_or("norm_topk_prob", false)?,
        "scoring_func": "sigmoid",
    }))
}

/// Experts in all layers; there is no MLP that `intermediate_size` could be the width of.
fn solar_open(keys: &Keys) -> Result<Value, HfConfigError> {
    keys.refuse("use_qk_norm", keys.flag_or("use_qk_norm", false)?)?;
    Ok(json!({
        "first_k_dense_replace": 0,
        "intermediate_size": keys.size_or("intermediate_size", 1)?,
    }))
}
