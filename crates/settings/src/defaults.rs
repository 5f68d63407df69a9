//! The default configuration, from the defaults in the rows.

use super::dotted;
use super::key::KeyDefault;
use super::keys::KEYS;
use super::schema::Config;
use serde::Deserialize;
use std::sync::LazyLock;
use toml::{Table, Value};

/// The default of every key that has one, read once, because a plan applies dozens of changes.
static DEFAULTS: LazyLock<(Table, Config)> = LazyLock::new(|| {
    let mut table = Table::new();
    for key in KEYS {
        if let KeyDefault::Value(text) = key.default {
            let value = text.parse().expect("defaults are TOML");
            dotted::insert(&mut table, key.name, value);
        }
    }
    let config = Config::deserialize(Value::Table(table.clone()));
    let config = config.expect("every key without a default may be absent");
    (table, config)
});

/// The default of every key that has one.
pub(crate) fn defaults() -> Table {
    DEFAULTS.0.clone()
}

impl Default for Config {
    /// The defaults of [`KEYS`].
    fn default() -> Config {
        DEFAULTS.1.clone()
    }
}
