//! Finds, checks and sets dotted keys in tables.

use crate::Result;
use toml::{Table, Value};

use super::error::ConfigError;
use super::key::Key;
use super::keys::KEYS;
use super::unknown::nearest_key;

/// The key with this name.
pub fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// Visits every key below `prefix` (dotted, empty at the root), and checks its value.
///
/// # Errors
/// For the first unknown key or invalid value. `place` says where it was given.
pub fn visit<'a>(
    prefix: &str,
    value: &'a Value,
    place: &str,
    found: &mut Vec<(String, &'a Value)>,
) -> Result {
    if let Some(key) = find(prefix) {
        key.kind.check(prefix, value, place)?;
        found.push((prefix.to_owned(), value));
        return Ok(());
    }
    if !prefix.is_empty() && !is_section(prefix) {
        return Err(unknown(prefix, value, place));
    }
    let Some(table) = value.as_table() else {
        return Err(ConfigError::Value {
            key: prefix.to_owned(),
            value: value.to_string(),
            place: place.to_owned(),
            expected: "a section with keys of its own".to_owned(),
        });
    };
    for (name, value) in table {
        visit(&join(prefix, name), value, place, found)?;
    }
    Ok(())
}

fn join(prefix: &str, name: &str) -> String {
    match prefix {
        "" => name.to_owned(),
        _ => format!("{prefix}.{name}"),
    }
}

fn is_section(name: &str) -> bool {
    KEYS.iter().any(|key| in_section(key, name).is_some())
}

/// A key's name within a section, if it is in that section.
fn in_section(key: &'static Key, section: &str) -> Option<&'static str> {
    key.name.strip_prefix(section)?.strip_prefix('.')
}

/// The error for an unknown name. If it is an unknown section, the error is for the first key in it.
fn unknown(name: &str, value: &Value, place: &str) -> ConfigError {
    if let Some((first, value)) = value.as_table().and_then(|table| table.iter().next()) {
        return unknown(&join(name, first), value, place);
    }
    let keys = KEYS.iter().map(|key| key.name);
    let flags = KEYS
        .iter()
        .filter_map(|key| Some((key.flag?.name, key.name)));
    ConfigError::UnknownKey {
        key: name.to_owned(),
        place: place.to_owned(),
        nearest: nearest_key(name, keys, flags),
    }
}

/// The names that exist in place of an unknown key: the keys of its section, or all sections.
pub fn overview(name: &str) -> String {
    let section = name.split('.').next().unwrap_or(name);
    let names = KEYS.iter().filter_map(|key| in_section(key, section));
    let names: Vec<&str> = names.collect();
    let explained = "configs/reference.toml in the source explains every key, and a run directory's config.toml has all \
                     their values";
    if names.is_empty() {
        let sections = KEYS.iter().filter_map(|key| key.name.split('.').next());
        let mut sections: Vec<&str> = sections.collect();
        sections.dedup();
        return format!("the sections are {}; {explained}", sections.join(", "));
    }
    format!("[{section}] has {}; {explained}", names.join(", "))
}

/// Sets the dotted `key`, and makes missing sections.
pub fn insert(table: &mut Table, key: &str, value: Value) {
    match key.split_once('.') {
        None => {
            table.insert(key.to_owned(), value);
        }
        Some((section, rest)) => {
            let entry = table
                .entry(section)
                .or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(section) = entry {
                insert(section, rest, value);
            }
        }
    }
}

/// Removes the dotted `key`, if it is there.
pub fn remove(table: &mut Table, key: &str) {
    match key.split_once('.') {
        None => {
            table.remove(key);
        }
        Some((section, rest)) => {
            if let Some(Value::Table(section)) = table.get_mut(section) {
                remove(section, rest);
            }
        }
    }
}

/// The value at the dotted `key`.
pub fn get<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    match key.split_once('.') {
        None => table.get(key),
        Some((section, rest)) => get(table.get(section)?.as_table()?, rest),
    }
}
