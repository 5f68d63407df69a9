//! The rotary embedding in a `config.json`: `rope_theta` and `rope_scaling`, or both as `rope_parameters` in newer files.

use super::keys::{HfConfigError, number};
use crate::rope_scaling::yarn_attention_factor;
use crate::{ModelConfig, RopeScaling};
use serde_json::{Value, json};

/// The base of the wavelengths. Newer files keep it in `rope_parameters`.
pub(super) fn theta(json: &Value, family: &str) -> Result<f64, HfConfigError> {
    let given = match number(json, "rope_theta")? {
        None => number(&json["rope_parameters"], "rope_theta")?,
        given => given,
    };
    Ok(given.unwrap_or(if family == "mixtral" { 1e6 } else { 10_000.0 }))
}

/// How the wavelengths are stretched.
pub(super) fn scaling(json: &Value) -> Result<Option<RopeScaling>, HfConfigError> {
    let older = &json["rope_scaling"];
    let (key, scaling) = match older.is_null() {
        true => ("rope_parameters", &json["rope_parameters"]),
        false => ("rope_scaling", older),
    };
    let unsupported = |what: &str| Err(HfConfigError::Unsupported(key, what.into()));
    // Such a file has separate parameters for each kind of layer.
    if scaling["full_attention"].is_object() || scaling["sliding_attention"].is_object() {
        return unsupported(&scaling.to_string());
    }
    let is_partial = |share: f64| share != 1.0;
    if number(scaling, "partial_rotary_factor")?.is_some_and(is_partial) {
        return unsupported(&scaling.to_string());
    }
    let required = |key: &'static str| {
        let number = number(scaling, key)?;
        number.ok_or(HfConfigError::Key(key, "a number"))
    };
    let kind = match &scaling["rope_type"] {
        Value::Null => &scaling["type"],
        kind => kind,
    };
    Ok(Some(match kind.as_str() {
        None if !kind.is_null() => return Err(HfConfigError::Key("rope_type", "a string")),
        None | Some("default") => return Ok(None),
        Some("linear") => RopeScaling::Linear {
            factor: required("factor")?,
        },
        Some("llama3") => RopeScaling::Llama3 {
            factor: required("factor")?,
            low_freq_factor: required("low_freq_factor")?,
            high_freq_factor: required("high_freq_factor")?,
            original_max_position: original_max_position(json, scaling)?,
        },
        Some("yarn") => yarn(json, scaling)?,
        Some(other) => return unsupported(other),
    }))
}

fn yarn(json: &Value, scaling: &Value) -> Result<RopeScaling, HfConfigError> {
    let original_max_position = original_max_position(json, scaling)?;
    let factor = match number(scaling, "factor")? {
        Some(factor) => factor,
        None => {
            let most = number(json, "max_position_embeddings")?;
            let most = most.ok_or(HfConfigError::Key("factor", "a number"))?;
            most / original_max_position as f64
        }
    };
    // As in transformers, a 0 here counts as absent.
    let given = |key| Ok::<_, HfConfigError>(number(scaling, key)?.filter(|value| *value != 0.0));
    let by_weights = match (given("mscale")?, given("mscale_all_dim")?) {
        (Some(one), Some(all)) => {
            Some(yarn_attention_factor(factor, one) / yarn_attention_factor(factor, all))
        }
        _ => None,
    };
    Ok(RopeScaling::Yarn {
        factor,
        original_max_position,
        beta_fast: given("beta_fast")?.unwrap_or(32.0),
        beta_slow: given("beta_slow")?.unwrap_or(1.0),
        attention_factor: number(scaling, "attention_factor")?.or(by_weights),
        mscale_all_dim: given("mscale_all_dim")?,
        truncate: scaling["truncate"] != false,
    })
}

/// The context of the original training: from the file's own key, else from the scaling's, else the longest context, as
/// in transformers.
fn original_max_position(json: &Value, scaling: &Value) -> Result<usize, HfConfigError> {
    const KEY: &str = "original_max_position_embeddings";
    let given = match number(json, KEY)? {
        None => number(scaling, KEY)?,
        given => given,
    };
    let given = match given {
        None => number(json, "max_position_embeddings")?,
        given => given,
    };
    let positions = given.ok_or(HfConfigError::Key(KEY, "a number"))?;
    Ok(positions as usize)
}

/// The value of `rope_scaling` for this scaling.
pub(super) fn written(scaling: &RopeScaling) -> Value {
    match scaling {
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position,
        }),
        RopeScaling::Yarn {
            factor,
            original_max_position,
            beta_fast,
            beta_slow,
            attention_factor,
            mscale_all_dim,
            truncate,
        } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original_max_position,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "attention_factor": attention_factor,
            "mscale_all_dim": mscale_all_dim,
            "truncate": truncate,
        }),
    }
}

/// The longest context that the file promises. transformers complains if the scaling reaches further than that.
pub(super) fn max_position(config: &ModelConfig, seq: usize) -> usize {
    let scaled = config.rope_scaling.as_ref().and_then(|scaling| {
        // A float that is too large becomes the largest integer.
        let original = scaling.original_max_position()? as f64;
        Some((original * scaling.factor()).round() as usize)
    });
    scaled.unwrap_or(0).max(seq)
}
