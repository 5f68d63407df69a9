//! A configuration together with the model, and the adapters, that its folders hold.

use crate::Result;
use std::ops::Deref;
use std::path::PathBuf;

use model::{AdapterConfig, ModelConfig, Quantisation};
use toml::{Table, Value};

use super::error::refused;
use super::lora::BaseStorage;
use super::resolve::Resolved;
use super::{Config, check};

/// Keys of `[model]` that no weight's shape depends on: a run may change them for a model that it starts from.
const FREE_OF_SHAPES: [&str; 10] = [
    "dropout",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
    "sliding_window",
    "full_attention_layers",
    "init_std",
    "router_aux",
    "router_aux_kind",
    "router_z_loss",
];

/// A folder's model, and what is on it.
#[derive(Clone, Debug)]
pub struct FolderModel {
    /// The folder.
    pub path: PathBuf,
    /// The text of its `config.json`.
    pub text: String,
    /// The model that the text describes.
    pub model: ModelConfig,
    /// How its matrices are stored, if as codes.
    pub stored: Option<Quantisation>,
    /// Another folder's adapters on it, and how training stored it under them.
    pub adapters: Option<(AdapterConfig, BaseStorage)>,
}

/// A command with what folders add to its configuration. What is still open is decided from here on alone.
#[derive(Clone, Debug)]
pub struct Completed {
    resolved: Resolved,
    /// The longest sequence that the model of `init_from` was made for, where its folder says so.
    pub context_length: Option<usize>,
}

impl Deref for Completed {
    type Target = Resolved;

    fn deref(&self) -> &Resolved {
        &self.resolved
    }
}

impl From<Config> for Completed {
    /// A run of a configuration that is whole.
    fn from(config: Config) -> Completed {
        let resolved = Resolved {
            config,
            seq_is_explicit: true,
            ..Resolved::default()
        };
        Completed {
            resolved,
            context_length: None,
        }
    }
}

impl Completed {
    /// The same without what happens between steps: the caller decides how many are made.
    pub fn of_steps_alone(mut self) -> Completed {
        self.resolved.config.without_between_steps();
        self
    }
}

impl Resolved {
    /// Adds what a folder says to the configuration, which must agree with what the user set.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`](crate::ConfigError::Contradiction) between the folder and the user's settings, and what [`Config::with`] refuses.
    pub fn complete(mut self, folder: Option<FolderModel>) -> Result<Completed> {
        let mut context_length = None;
        if let Some(folder) = folder {
            self.config.model = self.model_of(&folder)?;
            let (model, lora) = (&self.config.model, &mut self.config.lora);
            context_length = model.context_length(&folder.text);
            if let Some((adapters, base)) = folder.adapters {
                *lora = lora.adopted(adapters, base)?;
            }
            if let (Some(stored), Some(_)) = (&folder.stored, lora.rank) {
                lora.adopt_codes(stored, model.experts.is_some())?;
            }
            self.options.init_from = Some(folder.path);
            check::model(&self.config)?;
            check::contradictions(&self.config)?;
        }
        Ok(Completed {
            resolved: self,
            context_length,
        })
    }

    /// A folder's model, with those of the user's settings that no weight's shape depends on. All others must agree with the folder.
    fn model_of(&self, folder: &FolderModel) -> Result<ModelConfig> {
        let path = folder.path.join("config.json");
        let path = path.display();
        let (given, mut taken) = (
            Table::try_from(&self.config.model)?,
            Table::try_from(&folder.model)?,
        );
        // A folder's model names its family only where others have its features too.
        let family = folder.model.family().map(|family| family.name());
        if let Ok(family) = family {
            taken.entry("family").or_insert_with(|| family.into());
        }
        let is_said = given.contains_key("family") || folder.model.family.is_some();
        let show = |value: Option<&Value>| value.map_or("absent".into(), ToString::to_string);
        let contradicts = |key: &str, ours: &str, theirs: &str| {
            refused(format!(
                "{key} is {ours}, but {path} says {theirs}; leave the setting out, or start from another model"
            ))
        };
        for (section, part) in &self.model_parts {
            for (key, ours) in part.as_table().into_iter().flatten() {
                let theirs = taken.get(section).and_then(|theirs| theirs.get(key));
                if theirs != Some(ours) {
                    let key = format!("model.{section}.{key}");
                    return contradicts(&key, &ours.to_string(), &show(theirs));
                }
            }
        }
        for key in &self.explicit_model_keys {
            let name = key.trim_start_matches("model.");
            // A key of a section of its own goes with the whole section.
            let name = name.split('.').next().unwrap_or(name);
            if given.get(name) == taken.get(name) || self.model_parts.contains_key(name) {
                continue;
            }
            let (ours, theirs) = (show(given.get(name)), show(taken.get(name)));
            if !FREE_OF_SHAPES.contains(&name) {
                return contradicts(key, &ours, &theirs);
            }
            tracing::warn!("model.{name} is {ours}, where {path} says {theirs}");
            match given.get(name) {
                Some(value) => taken.insert(name.into(), value.clone()),
                None => taken.remove(name),
            };
        }
        if !is_said {
            taken.remove("family");
        }
        let model = Value::Table(taken).try_into();
        Ok(model.expect("each value was one of a model's before"))
    }
}
