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
    #[error("model_type `{found}` is not supported; this trainer knows {known}")]
    Family { found: String, known: String },
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

/// The keys of a `config.json`.
pub(super) struct Keys<'a>(pub(super) &'a Value);

impl<'a> Keys<'a> {
    /// The value of a key; null if it is missing.
    pub(super) fn get(&self, key: &str) -> &'a Value {
        &self.0[key]
    }

    /// Whether a key is missing; one that is null is not.
    pub(super) fn is_missing(&self, key: &str) -> bool {
        self.0.get(key).is_none()
    }

    /// Whether a key is missing or null.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.get(key).is_null()
    }

    /// A number, or what stands for one that is missing or null.
    pub(super) fn number_or(&self, key: &'static str, or: f64) -> Result<f64, HfConfigError> {
        Ok(number(self.0, key)?.unwrap_or(or))
    }

    /// A number, if it is neither missing nor null.
    pub(super) fn optional_number(&self, key: &'static str) -> Result<Option<f64>, HfConfigError> {
        number(self.0, key)
    }

    /// The same, where a class has a value of its own for a missing key, which null replaces by none.
    pub(super) fn optional_number_or(
        &self,
        key: &'static str,
        assumed: Option<f64>,
    ) -> Result<Option<f64>, HfConfigError> {
        match self.is_missing(key) {
            true => Ok(assumed),
            false => self.optional_number(key),
        }
    }

    /// A whole number.
    pub(super) fn size(&self, key: &'static str) -> Result<usize, HfConfigError> {
        let size = self.get(key).as_u64().map(|size| size as usize);
        size.ok_or(HfConfigError::Key(key, "a positive whole number"))
    }

    /// A whole number, if it is neither missing nor null.
    pub(super) fn optional_size(&self, key: &'static str) -> Result<Option<usize>, HfConfigError> {
        match self.is_null(key) {
            true => Ok(None),
            false => self.size(key).map(Some),
        }
    }

    /// The same, where a class has a value of its own for a missing key, which null replaces by none.
    pub(super) fn optional_size_or(
        &self,
        key: &'static str,
        assumed: Option<usize>,
    ) -> Result<Option<usize>, HfConfigError> {
        match self.is_missing(key) {
            true => Ok(assumed),
            false => self.optional_size(key),
        }
    }

    /// A whole number, or what stands for one that is missing or null.
    pub(super) fn size_or(&self, key: &'static str, or: usize) -> Result<usize, HfConfigError> {
        Ok(self.optional_size(key)?.unwrap_or(or))
    }

    /// A switch, or what stands for one that is missing or null.
    pub(super) fn flag_or(&self, key: &'static str, or: bool) -> Result<bool, HfConfigError> {
        match self.get(key) {
            Value::Null => Ok(or),
            value => value
                .as_bool()
                .ok_or(HfConfigError::Key(key, "true or false")),
        }
    }

    /// A list of layers, each below `layers`; none if it is missing or null.
    pub(super) fn layers(
        &self,
        key: &'static str,
        layers: usize,
    ) -> Result<Vec<usize>, HfConfigError> {
        let layer = |value: &Value| {
            let layer = value.as_u64().filter(|layer| *layer < layers as u64);
            layer.map(|layer| layer as usize)
        };
        let listed = match self.get(key) {
            Value::Null => Some(Vec::new()),
            Value::Array(list) => list.iter().map(layer).collect(),
            _ => None,
        };
        listed.ok_or(HfConfigError::Key(
            key,
            "a list of layers, each a whole number below `num_hidden_layers`",
        ))
    }

    /// Refuses a key whose value would change the arithmetic.
    pub(super) fn refuse(&self, key: &'static str, is_wrong: bool) -> Result<(), HfConfigError> {
        match is_wrong {
            true => Err(HfConfigError::Unsupported(key, self.get(key).to_string())),
            false => Ok(()),
        }
    }

    /// Refuses a name that is none of these.
    pub(super) fn refuse_other(
        &self,
        key: &'static str,
        known: &[&str],
    ) -> Result<(), HfConfigError> {
        let name = self.get(key).as_str();
        self.refuse(key, name.is_some_and(|name| !known.contains(&name)))
    }

    /// Refuses experts in a file of a dense family.
    pub(super) fn refuse_experts(&self) -> Result<(), HfConfigError> {
        let experts = self.get("num_experts").as_u64();
        self.refuse("num_experts", experts.is_some_and(|experts| experts > 1))
    }

    /// Refuses `mlp_bias` in a family whose class ignores it: a file that sets it describes another model.
    pub(super) fn refuse_mlp_bias(&self) -> Result<(), HfConfigError> {
        self.refuse("mlp_bias", *self.get("mlp_bias") == true)
    }
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

/// Refuses classes other than a family's, such as those without the language model's head.
pub(super) fn check_architecture(
    json: &Value,
    model_type: &str,
    class: &'static str,
) -> Result<(), HfConfigError> {
    let named = match &json["architectures"] {
        Value::Null => return Ok(()),
        named => named.as_array(),
    };
    let named = named.ok_or(HfConfigError::Key("architectures", "a list of names"))?;
    match named.iter().find(|name| **name != class) {
        None => Ok(()),
        Some(other) => Err(HfConfigError::Architecture {
            found: other.as_str().map_or(other.to_string(), Into::into),
            family: model_type.into(),
            known: class,
        }),
    }
}
