//! The rotary embedding in a `config.json`: `rope_theta` and `rope_scaling`, or both as `rope_parameters` in newer files.
//! Where a file has both forms, transformers decides which counts, and this does the same.

use super::keys::{HfConfigError, number};
use crate::rope_scaling::yarn_attention_factor;
use crate::{ModelConfig, RopeScaling};
use serde_json::{Value, json};

/// The object that has the parameters, and its key: `rope_scaling`, or `rope_parameters` if that is missing or empty.
fn parameters(json: &Value) -> Result<(&'static str, &Value), HfConfigError> {
    let is_empty =
        |value: &Value| value.is_null() || value.as_object().is_some_and(|it| it.is_empty());
    let key = match is_empty(&json["rope_scaling"]) {
        true => "rope_parameters",
        false => "rope_scaling",
    };
    match &json[key] {
        found @ (Value::Null | Value::Object(_)) => Ok((key, found)),
        _ => Err(HfConfigError::Key(key, "an object")),
    }
}

/// A number of that object. Older files have some of them beside it, which count where the object has none.
fn number_here_or_beside(json: &Value, key: &'static str) -> Result<Option<f64>, HfConfigError> {
    match number(parameters(json)?.1, key)? {
        None => number(json, key),
        given => Ok(given),
    }
}

/// The base of the wavelengths.
pub(super) fn theta(json: &Value, family: &str) -> Result<f64, HfConfigError> {
    let given = number_here_or_beside(json, "rope_theta")?;
    Ok(given.unwrap_or(if family == "mixtral" { 1e6 } else { 10_000.0 }))
}

/// How the wavelengths are stretched.
pub(super) fn scaling(json: &Value) -> Result<Option<RopeScaling>, HfConfigError> {
    let (key, scaling) = parameters(json)?;
    let unsupported = |what: &str| Err(HfConfigError::Unsupported(key, what.into()));
    // Such a file has separate parameters for each kind of layer.
    if scaling["full_attention"].is_object() || scaling["sliding_attention"].is_object() {
        return unsupported(&scaling.to_string());
    }
    const SHARE: &str = "partial_rotary_factor";
    if let Some(share) = number_here_or_beside(json, SHARE)?.filter(|share| *share != 1.0) {
        return Err(HfConfigError::Unsupported(SHARE, share.to_string()));
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

/// The context of the original training: from the file's own key, else from the scaling's, else the longest context.
/// transformers looks for it in this order when it makes the model, whatever its configuration says before.
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
