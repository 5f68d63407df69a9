//! Hints that are shown after an error.

use super::error::ConfigError;
use super::{dotted, preset};

impl ConfigError {
    /// A line for a `hint:` after the error, if there is one.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::UnknownKey { key, nearest, .. } => {
                Some(dotted::overview((*nearest).unwrap_or(key)))
            }
            Self::UnknownPreset { .. } => Some(format!(
                "the presets are {} (listed by `trainer --help`)",
                preset::names().collect::<Vec<_>>().join(", ")
            )),
            Self::Unreadable { .. } => Some(
                "--config takes a TOML file or a preset (`trainer --help` lists them)".to_owned(),
            ),
            Self::NotAnAssignment(_) => {
                Some("for example --set optim.beta2=0.99 or --set lr.schedule=cosine".to_owned())
            }
            _ => None,
        }
    }
}
