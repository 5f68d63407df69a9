//! Keeps approved peaks in a file, and reports how later peaks differ: a guard that anyone can use in CI.

use super::folded::{self, fold};
use super::rows::{Planned, Row};
use crate::failure::{Failure, Result};
use memory::format_bytes;
use planner::Plan;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The file: approved peaks by the strategy's name.
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
    /// Reserved bytes beyond the peak; none in files of older versions.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost_to_placement_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    planned_host_bytes: Option<u64>,
    /// None if it was only planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens_per_s: Option<f64>,
    /// Bytes of the leases that are live at the peak, by tensor, layer and phase.
    #[serde(with = "folded")]
    leases: BTreeMap<String, u64>,
}

/// How two sets of peaks differ.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Changes {
    /// Peaks that differ, strategies that are gone or new.
    pub(crate) failures: Vec<String>,
    /// Strategies that are slower.
    pub(crate) warnings: Vec<String>,
}

impl Golden {
    /// The peaks of a matrix.
    pub(crate) fn new(planned: &[Planned], rows: &[Row]) -> Golden {
        let plans = planned.iter().zip(rows).filter_map(|(planned, row)| {
            let plan = planned.plan.as_ref()?;
            let blessed = Blessed {
                planned_peak_bytes: plan.peak_bytes,
                lost_to_placement_bytes: Some(plan.reserved_bytes - plan.peak_bytes),
                planned_host_bytes: Some(plan.host_pinned_bytes),
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

    /// Reads such a file.
    ///
    /// # Errors
    /// If the file cannot be read, or does not hold peaks.
    pub(crate) fn read(path: &Path) -> Result<Golden> {
        let unusable = |what: &str| Failure::Malformed {
            path: path.into(),
            reason: format!(
                "{what}; `trainer bench --bless FILE` with the same flags writes such a file"
            ),
        };
        let text = files::read_small_text(path);
        let text = text.map_err(|error| unusable(&format!("it cannot be read: {error}")))?;
        serde_json::from_str(&text)
            .map_err(|error| unusable(&format!("it holds no peaks: {error}")))
    }

    /// Writes the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn write(&self, path: &Path) -> Result {
        let json = serde_json::to_string_pretty(self);
        let json = json.map_err(|error| Failure::Usage(error.to_string()))?;
        std::fs::write(path, json + "\n").map_err(Failure::file(path))
    }

    /// Compares with newer peaks. If only one side measured a peak, only the plans are compared. A loss of speed beyond
    /// `tolerance`, in percent, is a warning.
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
        let placed = [self, now].map(|one| one.lost_to_placement_bytes);
        let pinned = [self, now].map(|one| one.planned_host_bytes);
        let measured = [self, now].map(|one| one.peak_bytes);
        for (what, figures) in [
            ("lost to placement", placed),
            ("planned host memory", pinned),
            ("measured peak", measured),
        ] {
            if let [Some(was), Some(is)] = figures
                && was != is
            {
                changes
                    .failures
                    .push(format!("{name}: {}", moved(what, was, is)));
            }
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

    /// The leases at the peak that are new, gone, larger or smaller, a line each, the largest change first.
    fn leases_that_moved(&self, now: &Blessed) -> String {
        let names: BTreeSet<&String> = self.leases.keys().chain(now.leases.keys()).collect();
        let differences = names.into_iter().map(|name| {
            let bytes = |of: &Blessed| of.leases.get(name).copied().unwrap_or(0) as i64;
            (name.as_str(), bytes(now) - bytes(self))
        });
        let mut moved = fold(differences.filter(|(_, difference)| *difference != 0));
        moved.sort_by_key(|lease| Reverse(lease.bytes.unsigned_abs() * lease.count as u64));
        let lines = moved.iter().map(|lease| {
            let word = if lease.bytes > 0 { "grew" } else { "shrank" };
            let bytes = lease.bytes.unsigned_abs();
            let each = if lease.count > 1 { " in each" } else { "" };
            let (name, readable) = (&lease.name, format_bytes(bytes));
            format!("\n  {name} {word} by {bytes} bytes ({readable}){each}")
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
            lost_to_placement_bytes: Some(0),
            planned_host_bytes: None,
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

    /// The blocks that a model has gained have one line, and so do all blocks that grew by the same.
    #[test]
    fn blocks_that_moved_alike_are_one_line() {
        let lease = |block: usize| format!("`gate` (activation; block {block}, forward)");
        let of = |blocks: usize, bytes: u64| {
            let names: Vec<String> = (0..blocks).map(lease).collect();
            let leases: Vec<(&str, u64)> =
                names.iter().map(|name| (name.as_str(), bytes)).collect();
            golden(blocks as u64 * bytes, &leases, 1.0)
        };
        let change = |was: &Golden, is: &Golden| was.changes(is, 10.0).failures[0].clone();
        let deeper = "none: planned peak 112 bytes, 96 before (+16)\n  \
                      `gate` (activation; blocks 12-13, forward) grew by 8 bytes (8 B) in each";
        assert_eq!(change(&of(12, 8), &of(14, 8)), deeper);
        let wider = "none: planned peak 108 bytes, 96 before (+12)\n  \
                     `gate` (activation; blocks 0-11, forward) grew by 1 bytes (1 B) in each";
        assert_eq!(change(&of(12, 8), &of(12, 9)), wider);
    }

    /// The placement of a tensor may change while the peak stays the same.
    #[test]
    fn what_placement_loses_is_compared_where_both_know_it() {
        let losing = |bytes| {
            let mut golden = golden(300, &[], 1.0);
            let blessed = golden.strategies.values_mut().next().unwrap();
            blessed.lost_to_placement_bytes = bytes;
            golden
        };
        let changes = |was, is| losing(was).changes(&losing(is), 10.0);
        let expected = "none: lost to placement 10 bytes, 0 before (+10)";
        assert_eq!(changes(Some(0), Some(10)).failures, [expected]);
        assert_eq!(changes(None, Some(10)), Changes::default());
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
