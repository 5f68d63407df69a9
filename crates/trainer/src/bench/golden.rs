//! Peaks that somebody has looked at, in a file, and what has changed since: a guard for anyone's CI.

use super::rows::{Planned, Row};
use crate::failure::Failure;
use memory::format_bytes;
use planner::Plan;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The file: a strategy's peaks by its name.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Golden {
    /// Version of the trainer that wrote it.
    version: String,
    strategies: BTreeMap<String, Blessed>,
}

/// The peaks of a strategy.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Blessed {
    planned_peak_bytes: u64,
    /// None where it was not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens_per_s: Option<f64>,
    /// What is live at the peak: bytes by tensor, layer and phase of its lease.
    leases: BTreeMap<String, u64>,
}

/// What has changed.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Changes {
    /// Peaks that differ, strategies that are gone or new.
    pub(crate) failures: Vec<String>,
    /// What is slower.
    pub(crate) warnings: Vec<String>,
}

impl Golden {
    /// The peaks of a matrix.
    pub(crate) fn new(planned: &[Planned], rows: &[Row]) -> Golden {
        let plans = planned.iter().zip(rows).filter_map(|(planned, row)| {
            let plan = planned.plan.as_ref().ok()?;
            let blessed = Blessed {
                planned_peak_bytes: plan.peak_bytes,
                peak_bytes: row.peak_bytes,
                tokens_per_s: row.tokens_per_s,
                leases: leases(plan),
            };
            Some((row.strategy.clone(), blessed))
        });
        Golden {
            version: env!("CARGO_PKG_VERSION").into(),
            strategies: plans.collect(),
        }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or holds something else.
    pub(crate) fn read(path: &Path) -> Result<Golden, Failure> {
        let text = std::fs::read_to_string(path).map_err(|source| Failure::Unreadable {
            path: path.into(),
            source,
        })?;
        serde_json::from_str(&text).map_err(|error| {
            Failure::Usage(format!(
                "{} holds no peaks ({error}); `trainer bench --bless` writes them",
                path.display()
            ))
        })
    }

    /// Writes the file.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn write(&self, path: &Path) -> Result<(), Failure> {
        let json = serde_json::to_string_pretty(self);
        let json = json.map_err(|error| Failure::Usage(error.to_string()))?;
        std::fs::write(path, json + "\n").map_err(Failure::file(path))
    }

    /// Compares with what is now. A peak that only one side measured is compared by its plan alone; speed warns, beyond so
    /// many percent.
    pub(crate) fn changes(&self, now: &Golden, tolerance: f64) -> Changes {
        let mut changes = Changes::default();
        for (name, was) in &self.strategies {
            match now.strategies.get(name) {
                None => changes.failures.push(format!("{name}: it is gone")),
                Some(is) => was.compare(is, name, tolerance, &mut changes),
            }
        }
        let new = now
            .strategies
            .keys()
            .filter(|name| !self.strategies.contains_key(*name));
        changes
            .failures
            .extend(new.map(|name| format!("{name}: it is new; --bless takes it in")));
        changes
    }
}

impl Blessed {
    fn compare(&self, now: &Blessed, name: &str, tolerance: f64, changes: &mut Changes) {
        if self.planned_peak_bytes != now.planned_peak_bytes || self.leases != now.leases {
            let moved = moved(
                "planned peak",
                self.planned_peak_bytes,
                now.planned_peak_bytes,
            );
            changes
                .failures
                .push(format!("{name}: {moved}{}", self.leases_that_moved(now)));
        }
        if let (Some(was), Some(is)) = (self.peak_bytes, now.peak_bytes)
            && was != is
        {
            changes
                .failures
                .push(format!("{name}: {}", moved("measured peak", was, is)));
        }
        if let (Some(was), Some(is)) = (self.tokens_per_s, now.tokens_per_s)
            && is < was * (1.0 - tolerance / 100.0)
        {
            let slower = 100.0 * (1.0 - is / was);
            changes.warnings.push(format!(
                "{name}: {is:.0} tokens/s, {slower:.0} % fewer than {was:.0}"
            ));
        }
    }

    /// What is at the peak and was not, or was larger or smaller, a line each; the largest change first.
    fn leases_that_moved(&self, now: &Blessed) -> String {
        let names = self.leases.keys().chain(now.leases.keys());
        let mut moved: Vec<(i64, &String)> = names
            .map(|name| {
                let bytes = |of: &Blessed| of.leases.get(name).copied().unwrap_or(0) as i64;
                (bytes(now) - bytes(self), name)
            })
            .filter(|(difference, _)| *difference != 0)
            .collect();
        moved.sort_by_key(|(difference, name)| (-difference.abs(), *name));
        moved.dedup();
        let lines = moved.iter().map(|(difference, name)| {
            let word = if *difference > 0 { "grew" } else { "shrank" };
            let bytes = difference.unsigned_abs();
            format!(
                "\n  {name} {word} by {bytes} bytes ({})",
                format_bytes(bytes)
            )
        });
        lines.collect()
    }
}

fn moved(what: &str, was: u64, is: u64) -> String {
    let difference = is as i64 - was as i64;
    format!("{what} {is} bytes, {was} before ({difference:+})")
}

/// Bytes at a plan's peak by tensor, layer and phase.
fn leases(plan: &Plan) -> BTreeMap<String, u64> {
    let mut leases = BTreeMap::new();
    for lease in &plan.largest_at_peak {
        let Value::String(category) = serde_json::json!(lease.category) else {
            unreachable!("categories are words");
        };
        let key = format!(
            "`{}` ({category}; {}, {})",
            lease.name,
            lease.layer,
            lease.phase.name()
        );
        *leases.entry(key).or_default() += lease.bytes;
    }
    leases
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden(peak: u64, leases: &[(&str, u64)], tokens_per_s: f64) -> Golden {
        let leases = leases
            .iter()
            .map(|(name, bytes)| ((*name).to_string(), *bytes));
        let blessed = Blessed {
            planned_peak_bytes: peak,
            peak_bytes: Some(peak),
            tokens_per_s: Some(tokens_per_s),
            leases: leases.collect(),
        };
        Golden {
            version: String::new(),
            strategies: [("none".to_string(), blessed)].into(),
        }
    }

    #[test]
    fn what_grew_is_named_the_largest_first() {
        let was = golden(300, &[("`a`", 100), ("`b`", 200)], 10.0);
        let is = golden(556, &[("`a`", 356), ("`b`", 190), ("`c`", 10)], 10.0);
        let changes = was.changes(&is, 10.0);
        let [planned, measured] = changes.failures.as_slice() else {
            panic!("{changes:?}");
        };
        let lines: Vec<&str> = planned.lines().map(str::trim).collect();
        assert_eq!(lines[0], "none: planned peak 556 bytes, 300 before (+256)");
        assert_eq!(lines[1], "`a` grew by 256 bytes (256 B)");
        assert_eq!(
            lines[2..],
            [
                "`b` shrank by 10 bytes (10 B)",
                "`c` grew by 10 bytes (10 B)"
            ]
        );
        assert!(measured.contains("measured peak 556"));
    }

    #[test]
    fn the_same_is_no_change_and_speed_only_warns() {
        let was = golden(300, &[("`a`", 300)], 10.0);
        assert_eq!(
            was.changes(&golden(300, &[("`a`", 300)], 9.1), 10.0),
            Changes::default()
        );
        let changes = was.changes(&golden(300, &[("`a`", 300)], 8.0), 10.0);
        assert_eq!((changes.failures.len(), changes.warnings.len()), (0, 1));
    }

    #[test]
    fn strategies_that_come_and_go_fail() {
        let (some, none) = (golden(300, &[], 1.0), Golden::default());
        assert!(some.changes(&none, 10.0).failures[0].contains("gone"));
        assert!(none.changes(&some, 10.0).failures[0].contains("new"));
    }
}
