//! Gaps between a model and what a family's files can describe. There are none if reading what the family writes gives the same
//! configuration.

use super::{Family, SavedAs};
use crate::{ExpertsConfig, ModelConfig, ModelConfigError};
use serde_json::{Map, Value};
use std::fmt;

/// The gaps between a model and the files of a family.
pub(super) enum Gaps {
    None,
    /// Keys of `[model]` that the files cannot say, with their values.
    Keys(Vec<String>),
    /// The family refuses what it wrote, with this error.
    Unreadable(String),
}

impl Gaps {
    /// How far the family is from the model: one that cannot be read is farthest.
    fn count(&self) -> usize {
        match self {
            Gaps::None => 0,
            Gaps::Keys(keys) => keys.len(),
            Gaps::Unreadable(_) => usize::MAX,
        }
    }
}

impl fmt::Display for Gaps {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Gaps::None => Ok(()),
            Gaps::Keys(keys) => f.write_str(&keys.join(", ")),
            Gaps::Unreadable(error) => write!(f, "this model: {error}"),
        }
    }
}

/// The keys in which two models differ, with the first one's values.
fn differing(config: &ModelConfig, other: &ModelConfig) -> Vec<String> {
    let value = |of: &ModelConfig| serde_json::to_value(of).unwrap_or_default();
    let mut found = Vec::new();
    differing_keys("model", &value(config), &value(other), &mut found);
    found
}

/// Adds the keys in which two values differ: those of objects one by one.
fn differing_keys(key: &str, ours: &Value, theirs: &Value, found: &mut Vec<String>) {
    match (ours, theirs) {
        _ if ours == theirs => {}
        (Value::Object(ours), Value::Object(theirs)) => {
            let others = theirs.keys().filter(|key| !ours.contains_key(*key));
            for own in ours.keys().chain(others) {
                let value = |of: &Map<String, Value>| of.get(own).cloned().unwrap_or_default();
                differing_keys(&format!("{key}.{own}"), &value(ours), &value(theirs), found);
            }
        }
        (Value::Null, _) => found.push(format!("a model without {key}")),
        (Value::Object(_), _) => found.push(key.into()),
        _ => found.push(format!("{key} = {ours}")),
    }
}

impl Family {
    /// The gaps between a model and its files.
    pub(super) fn gaps(self, config: &ModelConfig) -> Gaps {
        let saved = SavedAs {
            seq: 1,
            dtype: "float32",
        };
        let read = match self.read(&self.write(config, &saved)) {
            Ok(read) => read,
            Err(error) => return Gaps::Unreadable(error.to_string()),
        };
        let is_all_experts = |experts: &ExpertsConfig| experts.dense_layers.is_empty();
        let has_ffn = !config.experts.as_ref().is_some_and(is_all_experts);
        // Losses of routers belong to a training run, not to the model.
        let read = ModelConfig {
            family: config.family,
            // Without dense layers the width of these says nothing.
            ffn: if has_ffn { read.ffn } else { config.ffn },
            router_aux: config.router_aux,
            router_aux_kind: config.router_aux_kind,
            router_z_loss: config.router_z_loss,
            ..read
        };
        match read == *config {
            true => Gaps::None,
            false => Gaps::Keys(differing(config, &read)),
        }
    }
}

impl ModelConfig {
    /// The family whose files it is written as: the one that it names, or the first that has all its features.
    ///
    /// # Errors
    /// With the features that the family lacks, or the nearest one.
    pub fn family(&self) -> Result<Family, ModelConfigError> {
        if let Some(family) = self.family {
            return match family.gaps(self) {
                Gaps::None => Ok(family),
                gaps => Err(ModelConfigError::NotInFamily {
                    family: family.name(),
                    lacked: gaps.to_string(),
                }),
            };
        }
        let mut nearest: Option<(Family, Gaps)> = None;
        for family in Family::all() {
            let gaps = family.gaps(self);
            if gaps.count() == 0 {
                return Ok(family);
            }
            let least = nearest.as_ref().map_or(usize::MAX, |(_, it)| it.count());
            if gaps.count() < least || nearest.is_none() {
                nearest = Some((family, gaps));
            }
        }
        let (family, gaps) = nearest.expect("there are families");
        Err(ModelConfigError::NoFamily {
            nearest: family.name(),
            lacked: gaps.to_string(),
        })
    }
}
