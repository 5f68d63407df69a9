//! The rotary embedding in a `config.json`: `rope_theta` and `rope_scaling`, or both as `rope_parameters` in newer files.
//! Where a file has both forms, transformers decides which counts, and this does the same.

use super::keys::{HfConfigError, Keys, number};
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

/// What transformers' class assumes of the rotary embedding.
pub(super) struct AssumedRope {
    /// The base of the wavelengths.
    pub(super) theta: f64,
    /// The share of a head that is turned; none: all of it, whatever a file says.
    pub(super) share: Option<f64>,
}

impl AssumedRope {
    /// What Llama's class assumes.
    pub(super) const LLAMA: AssumedRope = AssumedRope {
        theta: 10_000.0,
        share: None,
    };
}

/// What transformers' class assumes of the rotary embeddings of layers without a window, and of those with one.
pub(super) struct RopeByKind {
    /// That of layers without a window.
    pub(super) full: AssumedRope,
    /// That of layers with one.
    pub(super) sliding: AssumedRope,
    /// The key that older files have the base of the latter at.
    pub(super) sliding_theta: Option<&'static str>,
}

/// The rotary embedding that a file describes.
#[derive(Clone, PartialEq)]
pub(super) struct Rope {
    /// The base of the wavelengths.
    pub(super) theta: f64,
    /// The share of a head that is turned.
    pub(super) share: f64,
    /// How wavelengths are stretched.
    pub(super) scaling: Option<RopeScaling>,
}

/// Reads the rotary embedding of all layers.
pub(super) fn read(keys: &Keys, assumed: &AssumedRope) -> Result<Rope, HfConfigError> {
    let (key, given) = parameters(keys.0)?;
    // Such a file has separate parameters for each kind of layer.
    if [FULL, SLIDING].iter().any(|kind| given[*kind].is_object()) {
        return Err(HfConfigError::Unsupported(key, given.to_string()));
    }
    let theta = number_here_or_beside(keys.0, "rope_theta")?;
    Ok(Rope {
        theta: theta.unwrap_or(assumed.theta),
        share: share(keys, assumed)?,
        scaling: scaling(keys.0, (key, given))?,
    })
}

/// A copy of a file's keys, with this rotary embedding if the file has none.
pub(super) fn with_assumed(keys: &Keys, assumed: Value) -> Result<Value, HfConfigError> {
    let mut json = keys.0.clone();
    if parameters(keys.0)?.1.is_null() {
        json["rope_parameters"] = assumed;
    }
    Ok(json)
}

/// A number that must stand with the parameters of the rotary embedding.
pub(super) fn required(keys: &Keys, key: &'static str) -> Result<f64, HfConfigError> {
    let number = number(parameters(keys.0)?.1, key)?;
    number.ok_or(HfConfigError::Key(key, "a number beside rope_type"))
}

/// The context length of the original training.
const ORIGINAL: &str = "original_max_position_embeddings";

/// Transformers' name of layers without a window, in `layer_types` and where they have a rotary embedding of their own.
pub(super) const FULL: &str = "full_attention";
/// That of layers with a window.
pub(super) const SLIDING: &str = "sliding_attention";

/// Reads the rotary embeddings of layers without a window, and of those with one, which have parameters of their own. Older
/// files have those of the former alone; the latter then have the assumed base.
pub(super) fn read_by_kind(keys: &Keys, assumed: &RopeByKind) -> Result<[Rope; 2], HfConfigError> {
    const KEY: &str = "rope_parameters";
    let by_kind = keys.get(KEY);
    let older = keys.get("rope_scaling");
    let has_kinds = [FULL, SLIDING]
        .iter()
        .any(|kind| by_kind[*kind].is_object());
    // transformers merges the one into the other, or ignores one.
    keys.refuse(KEY, !by_kind.is_null() && (!has_kinds || !older.is_null()))?;
    keys.refuse(
        "rope_scaling",
        older["rope_type"].is_null() && !older["type"].is_null(),
    )?;
    share(keys, &assumed.full)?;
    // The class looks for it beside the factor alone.
    keys.refuse(ORIGINAL, !keys.is_null(ORIGINAL))?;
    let of_kind = |given: &Value, (older, assumed): (Option<&'static str>, &AssumedRope)| {
        let scaling = scaling(keys.0, (KEY, given))?;
        let older = older.map(|key| number(keys.0, key)).transpose()?.flatten();
        let theta = number(given, "rope_theta")?.or(older);
        Ok::<_, HfConfigError>(Rope {
            theta: theta.unwrap_or(assumed.theta),
            share: 1.0,
            // transformers reads `truncate` outside the kinds of layers, so here it always rounds.
            scaling: scaling.map(RopeScaling::truncated),
        })
    };
    let full = if has_kinds { &by_kind[FULL] } else { older };
    Ok([
        of_kind(full, (Some("rope_theta"), &assumed.full))?,
        of_kind(&by_kind[SLIDING], (assumed.sliding_theta, &assumed.sliding))?,
    ])
}

/// Writes rotary embeddings by kind of layer, in place of one for all.
pub(super) fn write_by_kind(config: &ModelConfig, json: &mut Value) {
    let of_kind = |theta: f64, scaling: Option<&RopeScaling>| {
        let mut written = scaling.map_or(json!({"rope_type": "default"}), written);
        written["rope_theta"] = json!(theta);
        written
    };
    let scaling = config.rope_scaling.as_ref();
    let full = of_kind(config.rope_theta, scaling);
    let sliding = match config.window_rope_theta {
        Some(theta) => of_kind(theta, None),
        None => full.clone(),
    };
    for key in ["rope_theta", "rope_scaling"] {
        let keys = json.as_object_mut();
        keys.expect("it was made as an object").shift_remove(key);
    }
    json["rope_parameters"] = json!({FULL: full, SLIDING: sliding});
}

/// The share of a head that is turned.
fn share(keys: &Keys, assumed: &AssumedRope) -> Result<f64, HfConfigError> {
    const KEY: &str = "partial_rotary_factor";
    let given = number_here_or_beside(keys.0, KEY)?;
    match (given, assumed.share) {
        (Some(share), None) if share != 1.0 => {
            Err(HfConfigError::Unsupported(KEY, share.to_string()))
        }
        (given, assumed) => Ok(given.or(assumed).unwrap_or(1.0)),
    }
}

/// The kind of rotary embedding; older files have another name for the key.
fn kind(parameters: &Value) -> &Value {
    match &parameters["rope_type"] {
        Value::Null => &parameters["type"],
        kind => kind,
    }
}

/// How the wavelengths are stretched by these parameters, which stand at `key`.
fn scaling(
    json: &Value,
    (key, scaling): (&'static str, &Value),
) -> Result<Option<RopeScaling>, HfConfigError> {
    let unsupported = |what: &str| Err(HfConfigError::Unsupported(key, what.into()));
    let required = |key: &'static str| {
        let number = number(scaling, key)?;
        number.ok_or(HfConfigError::Key(key, "a number"))
    };
    let kind = kind(scaling);
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
        truncate: truncate(scaling)?,
    })
}

/// Reads Phi-3's rotary embedding, which LongRoPE stretches, or nothing.
pub(super) fn read_phi3(keys: &Keys, assumed: &AssumedRope) -> Result<Rope, HfConfigError> {
    let theta = number_here_or_beside(keys.0, "rope_theta")?;
    Ok(Rope {
        theta: theta.unwrap_or(assumed.theta),
        share: share(keys, assumed)?,
        scaling: long_rope(keys)?,
    })
}

/// Whether YaRN's blended pairs are rounded: transformers takes null for false, and a missing key for true.
fn truncate(scaling: &Value) -> Result<bool, HfConfigError> {
    match scaling.get("truncate") {
        None => Ok(true),
        Some(Value::Null) => Ok(false),
        Some(value) => value
            .as_bool()
            .ok_or(HfConfigError::Key("truncate", "true or false")),
    }
}

/// LongRoPE, which older files of Phi-3 call by other names.
fn long_rope(keys: &Keys) -> Result<Option<RopeScaling>, HfConfigError> {
    let (key, given) = parameters(keys.0)?;
    let kind = kind(given);
    match kind.as_str() {
        None | Some("default") => return Ok(None),
        Some("longrope" | "su" | "yarn") => {}
        Some(other) => return Err(HfConfigError::Unsupported(key, other.into())),
    }
    let factors = |key: &'static str| {
        let list = given[key].as_array();
        let list = list.and_then(|list| list.iter().map(Value::as_f64).collect());
        list.ok_or(HfConfigError::Key(key, "a list of numbers"))
    };
    // transformers takes no other, and assumes this one.
    let original = keys.size_or(ORIGINAL, 4096)?;
    let most = keys.number_or("max_position_embeddings", 4096.0)?;
    let factor = number(given, "factor")?.unwrap_or(most / original.max(1) as f64);
    Ok(Some(RopeScaling::LongRope {
        factor,
        original_max_position: original,
        short_factor: factors("short_factor")?,
        long_factor: factors("long_factor")?,
        attention_factor: number(given, "attention_factor")?,
    }))
}

/// The context of the original training: from the file's own key, else from the scaling's, else the longest context.
/// transformers looks for it in this order when it makes the model, whatever its configuration says before.
fn original_max_position(json: &Value, scaling: &Value) -> Result<usize, HfConfigError> {
    let given = match number(json, ORIGINAL)? {
        None => number(scaling, ORIGINAL)?,
        given => given,
    };
    let given = match given {
        None => number(json, "max_position_embeddings")?,
        given => given,
    };
    let positions = given.ok_or(HfConfigError::Key(ORIGINAL, "a number"))?;
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
        RopeScaling::LongRope {
            factor,
            original_max_position,
            short_factor,
            long_factor,
            attention_factor,
        } => json!({
            "rope_type": "longrope",
            "factor": factor,
            "original_max_position_embeddings": original_max_position,
            "short_factor": short_factor,
            "long_factor": long_factor,
            "attention_factor": attention_factor,
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
