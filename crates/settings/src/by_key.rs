//! A configuration by its keys.

use super::dotted;
use super::error::ConfigError;
use super::key::Key;
use super::keys::KEYS;
use super::schema::Config;
use toml::{Table, Value};

/// A key, and its value in each of two configurations.
pub(crate) type Difference = (&'static Key, Option<Value>, Option<Value>);

impl Config {
    /// Every key that has a value.
    ///
    /// # Errors
    /// A value that TOML cannot express.
    pub fn values(&self) -> Result<Vec<(&'static Key, Value)>, ConfigError> {
        let table = Table::try_from(self)?;
        let value = |key: &'static Key| Some((key, dotted::get(&table, key.name)?.clone()));
        Ok(KEYS.iter().filter_map(value).collect())
    }

    /// The keys that have other values here than there, each with the value here and the one there.
    ///
    /// # Errors
    /// A value that TOML cannot express.
    pub(crate) fn differences(&self, other: &Config) -> Result<Vec<Difference>, ConfigError> {
        let [here, there] = [Table::try_from(self)?, Table::try_from(other)?];
        let both = KEYS.iter().map(|key| {
            let value = |table| dotted::get(table, key.name).cloned();
            (key, value(&here), value(&there))
        });
        Ok(both.filter(|(_, here, there)| here != there).collect())
    }
}
