//! The families of models, a file each: what a `config.json` of its `model_type` says, what transformers' class assumes of
//! keys that are missing, and what is refused. To add a family, add its file, and a line to `FAMILIES`.

mod aliases;
mod decoder;
mod deepseek_v2;
mod deepseek_v3;
mod experts;
mod glm4_moe;
mod glm4_moe_lite;
mod gpt2;
mod granite;
mod latent;
mod llama;
mod ministral3;
mod mistral;
mod mixtral;
mod olmo2;
mod olmo3;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod smollm3;
mod windows;

use super::keys::{HfConfigError, Keys};
use crate::{ExpertsConfig, ModelConfig, ModelConfigError};
pub(super) use aliases::{names as alias_names, of_family};
pub(super) use latent::PREDICTORS;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use serde_json::{Map, Value};
use std::fmt;

/// All families. A model that names none is written as the first that has all its features.
const FAMILIES: [&Description; 18] = [
    &llama::FAMILY,
    &mistral::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &phi3::FAMILY,
    &mixtral::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3_moe::FAMILY,
    &deepseek_v2::FAMILY,
    &deepseek_v3::FAMILY,
    &gpt2::FAMILY,
    &smollm3::FAMILY,
    &granite::FAMILY,
    &olmo2::FAMILY,
    &olmo3::FAMILY,
    &ministral3::FAMILY,
    &glm4_moe::FAMILY,
    &glm4_moe_lite::FAMILY,
];

/// What a family's file says.
struct Description {
    /// Its `model_type`.
    model_type: &'static str,
    /// Transformers' class that has the language model's head.
    class: &'static str,
    /// Transformers' attribute map: the first name stands for the second, and wins where a file has both.
    aliases: &'static [(&'static str, &'static str)],
    /// How files name experts.
    experts: ExpertNames,
    /// The model that the keys describe.
    read: fn(&Keys) -> Result<ModelConfig, HfConfigError>,
    /// The keys of a model, without its class and type. What the family does not have is left out.
    write: fn(&ModelConfig, &Saved) -> Value,
}

/// How a model is saved.
pub(super) struct Saved {
    /// The longest sequence that it was trained on.
    pub(super) seq: usize,
    /// What transformers calls the type of its weights.
    pub(super) dtype: &'static str,
}

/// The names of experts in files.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ExpertNames {
    /// The module of the router and of the experts.
    pub(crate) module: &'static str,
    /// The parts of an expert's first product.
    pub(crate) up: &'static [&'static str],
    /// The second product.
    pub(crate) down: &'static [&'static str],
}

impl ExpertNames {
    /// The names that most families have.
    pub(crate) const USUAL: ExpertNames = ExpertNames {
        module: "mlp",
        up: &["gate_proj", "up_proj"],
        down: &["down_proj"],
    };
}

/// A family of models: a `model_type` of transformers.
#[derive(Clone, Copy)]
pub struct Family(&'static Description);

impl Family {
    /// The names of all families.
    pub const NAMES: &'static [&'static str] = &{
        let mut names = [""; FAMILIES.len()];
        let mut at = 0;
        while at < names.len() {
            names[at] = FAMILIES[at].model_type;
            at += 1;
        }
        names
    };

    fn all() -> impl Iterator<Item = Family> {
        FAMILIES.into_iter().map(Family)
    }

    /// The family with this `model_type`.
    pub(super) fn find(model_type: &str) -> Option<Family> {
        Family::all().find(|family| family.name() == model_type)
    }

    /// Its `model_type`.
    pub fn name(self) -> &'static str {
        self.0.model_type
    }

    /// Transformers' class that has the language model's head.
    pub(super) fn class(self) -> &'static str {
        self.0.class
    }

    /// How its files name experts.
    pub(crate) fn experts(self) -> ExpertNames {
        self.0.experts
    }

    /// The model that a file of this family describes.
    pub(super) fn read(self, json: &Value) -> Result<ModelConfig, HfConfigError> {
        (self.0.read)(&Keys(&self.without_aliases(json)))
    }

    /// The same file with each value under the one name by which it is read.
    fn without_aliases(self, json: &Value) -> Value {
        let mut json = json.clone();
        for (alias, key) in self.0.aliases {
            if !json[*alias].is_null() {
                json[*key] = json[*alias].take();
            }
        }
        json
    }

    /// The `config.json` of a model of this family.
    pub(super) fn write(self, config: &ModelConfig, saved: &Saved) -> Value {
        let mut json = Map::new();
        json.insert("architectures".into(), vec![self.class()].into());
        json.insert("model_type".into(), self.name().into());
        let Value::Object(keys) = (self.0.write)(config, saved) else {
            unreachable!("a family writes an object");
        };
        json.extend(keys);
        Value::Object(json)
    }

    /// The keys of `[model]` that would have other values in a file of this family than `config` has.
    fn lacks(self, config: &ModelConfig) -> Vec<String> {
        let saved = Saved {
            seq: 1,
            dtype: "float32",
        };
        let read = self.read(&self.write(config, &saved));
        // Losses of routers belong to a training run, not to the model.
        let is_all_experts = |experts: &ExpertsConfig| experts.dense_layers.is_empty();
        let has_ffn = !config.experts.as_ref().is_some_and(is_all_experts);
        let read = read.map(|read| ModelConfig {
            family: config.family,
            // Without dense layers the width of these says nothing.
            ffn: if has_ffn { read.ffn } else { config.ffn },
            router_aux: config.router_aux,
            router_aux_kind: config.router_aux_kind,
            router_z_loss: config.router_z_loss,
            ..read
        });
        match read {
            Ok(read) if read == *config => Vec::new(),
            Ok(read) => differing(config, &read),
            Err(HfConfigError::Unsupported(key, _) | HfConfigError::Key(key, _)) => {
                vec![key.into()]
            }
            Err(_) => vec!["its sizes".into()],
        }
    }

    /// Whether a file of this family can describe a model.
    pub(super) fn has(self, config: &ModelConfig) -> bool {
        self.lacks(config).is_empty()
    }
}

/// The keys in which two models differ, with the first one's values.
fn differing(config: &ModelConfig, other: &ModelConfig) -> Vec<String> {
    let keys = |of: &ModelConfig| match serde_json::to_value(of) {
        Ok(Value::Object(keys)) => keys,
        _ => unreachable!("a configuration has keys"),
    };
    let (ours, theirs) = (keys(config), keys(other));
    let names = ours
        .keys()
        .chain(theirs.keys().filter(|key| !ours.contains_key(*key)));
    let differing = names.filter(|key| ours.get(*key) != theirs.get(*key));
    let shown = differing.map(|key| match ours.get(key) {
        Some(value @ (Value::Object(_) | Value::Array(_))) if value.to_string().len() > 40 => {
            format!("model.{key}")
        }
        Some(value) => format!("model.{key} = {value}"),
        None => format!("no model.{key}"),
    });
    shown.collect()
}

impl ModelConfig {
    /// The family whose files it is written as: the one that it names, or the first that has all its features.
    ///
    /// # Errors
    /// With the features that the family lacks, or the nearest one.
    pub fn family(&self) -> Result<Family, ModelConfigError> {
        if let Some(family) = self.family {
            let lacked = family.lacks(self);
            return match lacked.is_empty() {
                true => Ok(family),
                false => Err(ModelConfigError::NotInFamily {
                    family: family.name(),
                    lacked: lacked.join(", "),
                }),
            };
        }
        let mut nearest: Option<(Family, Vec<String>)> = None;
        for family in Family::all() {
            let lacked = family.lacks(self);
            if lacked.is_empty() {
                return Ok(family);
            }
            if nearest
                .as_ref()
                .is_none_or(|(_, least)| lacked.len() < least.len())
            {
                nearest = Some((family, lacked));
            }
        }
        let (family, lacked) = nearest.expect("there are families");
        Err(ModelConfigError::NoFamily {
            nearest: family.name(),
            lacked: lacked.join(", "),
        })
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Family {}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Family {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Family {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Family, D::Error> {
        let name = String::deserialize(deserializer)?;
        let unknown = || D::Error::custom(format!("{name:?} is no family of models"));
        Family::find(&name).ok_or_else(unknown)
    }
}
