//! Reads a configuration by its keys.

use super::dotted;
use super::key::Key;
use super::keys::KEYS;
use super::schema::Config;
use crate::Result;
use toml::{Table, Value};

/// A key, and its values in two configurations.
pub(crate) type Difference = (&'static Key, Option<Value>, Option<Value>);

impl Config {
    /// Every key that has a value, with the value.
    ///
    /// # Errors
    /// If a value cannot be written in TOML.
    pub fn values(&self) -> Result<Vec<(&'static Key, Value)>> {
        let table = Table::try_from(self)?;
        let value = |key: &'static Key| Some((key, dotted::get(&table, key.name)?.clone()));
        Ok(KEYS.iter().filter_map(value).collect())
    }

    /// The keys whose values differ in `other`, each with the value here and the value there.
    ///
    /// # Errors
    /// If a value cannot be written in TOML.
    pub(crate) fn differences(&self, other: &Config) -> Result<Vec<Difference>> {
        let [here, there] = [Table::try_from(self)?, Table::try_from(other)?];
        let both = KEYS.iter().map(|key| {
            let value = |table| dotted::get(table, key.name).cloned();
            (key, value(&here), value(&there))
        });
        // As texts, since the order of a table counts.
        let text = |value: &Option<Value>| value.as_ref().map(Value::to_string);
        Ok(both
            .filter(|(_, here, there)| text(here) != text(there))
            .collect())
    }
}
