//! A configuration file of another trainer: whose it is, and all its keys.

use super::arguments::Arguments;
use super::program::Program;
use crate::failure::{Failure, Result};
use files::unique_json;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// More bytes than a configuration has.
const MOST_BYTES: u64 = 1 << 20;

/// A key of a file, with its value.
#[derive(Clone, Debug)]
pub(crate) struct ForeignKey {
    /// Its name, with those of the sections that hold it: `training.seq_len`.
    pub(crate) name: String,
    /// A number, a text, a list, true, false or null.
    pub(crate) value: Value,
}

/// A file of another trainer.
#[derive(Debug)]
pub(crate) struct ForeignFile {
    /// As the command line names it.
    pub(crate) path: PathBuf,
    /// Whose it is.
    pub(crate) program: Program,
    /// All its keys, in order.
    pub(crate) keys: Vec<ForeignKey>,
}

impl ForeignFile {
    /// Reads a file. A folder stands for the `config.json` in it.
    ///
    /// # Errors
    /// It cannot be read, is larger than a configuration, is broken, is of no trainer that is known, is a shell script, or is YAML and
    /// this build cannot read that.
    pub(crate) fn read(path: &Path) -> Result<ForeignFile> {
        let path = match path.is_dir() {
            true => path.join("config.json"),
            false => path.to_owned(),
        };
        let malformed = |reason: String| Failure::Malformed {
            path: path.clone(),
            reason,
        };
        let text = text(&path).map_err(malformed)?;
        if cfg!(not(feature = "yaml")) && is_yaml(&path) {
            return Err(Failure::NotBuilt {
                what: "reading YAML",
                feature: "yaml",
            });
        }
        if is_arguments(&path, &text) {
            return ForeignFile::of_arguments(path, &text);
        }
        let keys = keys(&path, &text).map_err(malformed)?;
        let program = program_of(&path, &keys)?;
        if program == Program::HuggingFaceModel && !path.ends_with("config.json") {
            return Err(malformed(
                "--init-from DIR reads the model from here, so the file has to be called config.json, in a folder".into(),
            ));
        }
        Ok(ForeignFile {
            path,
            program,
            keys,
        })
    }

    /// Reads a list of arguments. Of flags that stand twice, the last counts, as it does for the program.
    fn of_arguments(path: PathBuf, text: &str) -> Result<ForeignFile> {
        let Arguments {
            program: script,
            flags,
        } = Arguments::read(text).map_err(|word| Failure::ShellScript {
            path: path.clone(),
            word,
        })?;
        let flags: Map<String, Value> = flags
            .into_iter()
            .map(|(name, value)| (name, Value::String(value)))
            .collect();
        let mut keys = Vec::new();
        flatten("", Value::Object(flags), &mut keys);
        let program = program_of(&path, &keys)?;
        let is_gpt = |script: &String| script.ends_with("pretrain_gpt.py");
        match script {
            Some(script) if program == Program::Megatron && !is_gpt(&script) => {
                Err(Failure::Usage(format!(
                    "{} starts {script}, and of Megatron-LM's programs only pretrain_gpt.py trains models that are planned here",
                    path.display()
                )))
            }
            _ => Ok(ForeignFile {
                path,
                program,
                keys,
            }),
        }
    }
}

/// Whose keys these are.
fn program_of(path: &Path, keys: &[ForeignKey]) -> Result<Program> {
    Program::of(keys.iter().map(|key| key.name.as_str())).ok_or_else(|| Failure::Malformed {
        path: path.to_owned(),
        reason: format!(
            "its keys are those of no trainer that is known: {}",
            Program::NAMES
        ),
    })
}

fn text(path: &Path) -> Result<String, String> {
    let bytes = files::read_at_most(path, MOST_BYTES).map_err(|error| error.to_string())?;
    String::from_utf8(bytes).map_err(|error| format!("it is no text: {error}"))
}

fn ending(path: &Path) -> Option<&str> {
    path.extension().and_then(|ending| ending.to_str())
}

fn is_yaml(path: &Path) -> bool {
    matches!(ending(path), Some("yaml" | "yml"))
}

/// Whether a text is a list of arguments, since its ending and its beginning name no other format.
fn is_arguments(path: &Path, text: &str) -> bool {
    let is_file = matches!(ending(path), Some("json" | "toml" | "yaml" | "yml"));
    !is_file && !text.trim_start().starts_with('{')
}

/// The keys of JSON or YAML.
fn keys(path: &Path, text: &str) -> Result<Vec<ForeignKey>, String> {
    let root: Value = match ending(path) {
        #[cfg(feature = "yaml")]
        _ if is_yaml(path) => yaml(text)?,
        Some("toml") => {
            return Err("it is TOML, in which no trainer that is read here is configured (torchtitan no longer is); --config takes a \
                 configuration of this trainer"
                .into());
        }
        _ => unique_json(text).map_err(|error| format!("as JSON: {error}"))?,
    };
    if !root.is_object() {
        return Err("it has no keys: a configuration is a table of keys and values".into());
    }
    let mut keys = Vec::new();
    flatten("", root, &mut keys);
    Ok(keys)
}

#[cfg(feature = "yaml")]
fn yaml(text: &str) -> Result<Value, String> {
    let broken = |error: serde_saphyr::Error| {
        let words = error.without_snippet().to_string();
        format!("as YAML: {}", words.replace('\n', ", "))
    };
    serde_saphyr::from_str(text).map_err(broken)
}

/// Lists what is below a value. A list of sections has their numbers in its keys: `datasets[0].path`.
fn flatten(name: &str, value: Value, into: &mut Vec<ForeignKey>) {
    match value {
        Value::Object(section) if !section.is_empty() => {
            for (key, value) in section {
                let name = match name {
                    "" => key,
                    _ => format!("{name}.{key}"),
                };
                flatten(&name, value, into);
            }
        }
        Value::Array(items) if items.iter().any(|item| item.is_object() || item.is_array()) => {
            for (number, item) in items.into_iter().enumerate() {
                flatten(&format!("{name}[{number}]"), item, into);
            }
        }
        value => into.push(ForeignKey {
            name: name.to_owned(),
            value,
        }),
    }
}
