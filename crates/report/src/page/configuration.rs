//! Compares resolved configurations key by key.

use crate::Table;
use settings::Config;
use toml::Value;

/// Shown for a key without a value.
const ABSENT: &str = "not set";

/// The keys that differ from [`Config::default`].
pub(super) fn changed(config: &toml::Table) -> Option<Table> {
    let defaults = Config::default().to_toml().ok()?.parse().ok()?;
    differing(["default", "this run"], &defaults, config)
}

/// The keys that differ between two configurations; none if there are none.
pub(super) fn differing(heads: [&str; 2], one: &toml::Table, other: &toml::Table) -> Option<Table> {
    let (one, other) = (flat(one), flat(other));
    let find = |keys: &[(String, String)], name: &str| {
        let found = keys.iter().find(|(key, _)| key == name);
        found.map_or(ABSENT.to_string(), |(_, value)| value.clone())
    };
    let mut names: Vec<&String> = one.iter().chain(&other).map(|(name, _)| name).collect();
    names.sort();
    names.dedup();
    let mut table = Table::new(&["setting", heads[0], heads[1]], &[]);
    let mut is_empty = true;
    for name in names {
        let (one, other) = (find(&one, name), find(&other, name));
        if one != other {
            table.row([name.clone(), one, other]);
            is_empty = false;
        }
    }
    (!is_empty).then_some(table)
}

/// Every key with its section and its value.
fn flat(table: &toml::Table) -> Vec<(String, String)> {
    let below = |(name, value): (&String, &Value)| match value {
        Value::Table(table) => flat(table)
            .into_iter()
            .map(|(key, value)| (format!("{name}.{key}"), value))
            .collect(),
        Value::String(text) => vec![(name.clone(), text.clone())],
        other => vec![(name.clone(), other.to_string())],
    };
    table.iter().flat_map(below).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named_with_both_values() {
        let table = |text: &str| text.parse::<toml::Table>().unwrap();
        let one = table("[a]\nx = 1\ny = 'same'\n[a.ranges]\n'0-3' = 'full'\n");
        let other = table("[a]\nx = 2\ny = 'same'\n");
        let text = differing(["A", "B"], &one, &other).unwrap().to_string();
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| {
                line.split("  ")
                    .filter(|cell| !cell.is_empty())
                    .map(str::trim)
                    .collect()
            })
            .collect();
        assert_eq!(
            lines[1..],
            [
                vec!["a.ranges.0-3", "full", "not set"],
                vec!["a.x", "1", "2"]
            ]
        );
        assert!(differing(["A", "B"], &one, &one).is_none());
    }
}
