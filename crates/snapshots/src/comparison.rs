//! Compares two peaks: which allocations grew.

use crate::peak::{LiveGroup, RecordedPeak};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// The form of `check --json`. It rises with every new field, and with any change of a
/// field's name, type or meaning (`crates/trainer/schemas/`).
const SCHEMA_VERSION: u32 = 2;

/// The peaks of two files beside each other. `check --json`.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// The form of this output.
    schema_version: u32,
    /// Whether the peak of any device grew by more than what is tolerated, of those that both files recorded.
    pub grew: bool,
    /// A device each, by number.
    pub devices: Vec<DeviceComparison>,
}

/// One of the two files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ComparedFile {
    /// What was before.
    Base,
    /// What is now.
    New,
}

/// The peaks of one device beside each other.
#[derive(Debug, Serialize)]
pub struct DeviceComparison {
    /// Its number.
    pub device: u32,
    /// Bytes by which the peak may grow.
    pub tolerance_bytes: u64,
    /// Whether it grew by more; false where there is nothing to compare.
    pub grew: bool,
    /// The only file in which something was recorded on the device; none if that is so in both, or in neither.
    pub only_in: Option<ComparedFile>,
    /// The peak before; none if the file does not name the device.
    pub base: Option<RecordedPeak>,
    /// The peak now.
    pub new: Option<RecordedPeak>,
    /// Allocations that have other bytes at the peak, those that grew most first.
    pub changes: Vec<GroupChange>,
}

/// The live bytes of one group at two peaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupChange {
    /// Where it was allocated; its category, where no more is known of both.
    pub place: String,
    /// The line, where the function has the same lines in both; else the lines now, if there are any.
    pub lines: Vec<u32>,
    /// Its category: parameters, gradients and so on.
    pub category: String,
    /// Bytes before.
    pub base_bytes: u64,
    /// Bytes now.
    pub new_bytes: u64,
    /// Allocations before.
    pub base_count: u64,
    /// Allocations now.
    pub new_count: u64,
}

impl Comparison {
    /// Compares peaks device by device. `tolerance` has the bytes by which a peak of so many bytes may grow.
    pub fn new(
        base: &[RecordedPeak],
        new: &[RecordedPeak],
        tolerance: impl Fn(u64) -> u64,
    ) -> Comparison {
        let all = base.iter().chain(new);
        let numbers: BTreeSet<u32> = all.map(|peak| peak.device).collect();
        let of = |peaks: &[RecordedPeak], number| {
            peaks.iter().find(|peak| peak.device == number).cloned()
        };
        let devices: Vec<DeviceComparison> = numbers
            .into_iter()
            .map(|number| {
                DeviceComparison::new(number, of(base, number), of(new, number), &tolerance)
            })
            .collect();
        Comparison {
            schema_version: SCHEMA_VERSION,
            grew: devices.iter().any(|device| device.grew),
            devices,
        }
    }
}

impl DeviceComparison {
    fn new(
        device: u32,
        base: Option<RecordedPeak>,
        new: Option<RecordedPeak>,
        tolerance: impl Fn(u64) -> u64,
    ) -> DeviceComparison {
        let bytes = |peak: &Option<RecordedPeak>| peak.as_ref().map_or(0, |peak| peak.peak_bytes);
        let tolerance_bytes = tolerance(bytes(&base));
        let is_recorded =
            |peak: &Option<RecordedPeak>| peak.as_ref().is_some_and(|peak| peak.is_recorded);
        let only_in = match (is_recorded(&base), is_recorded(&new)) {
            (true, false) => Some(ComparedFile::Base),
            (false, true) => Some(ComparedFile::New),
            _ => None,
        };
        let more = bytes(&new) > bytes(&base).saturating_add(tolerance_bytes);
        DeviceComparison {
            device,
            tolerance_bytes,
            grew: only_in.is_none() && more,
            changes: match only_in {
                None => changes(&groups(&base, &new), &groups(&new, &base)),
                Some(_) => Vec::new(),
            },
            only_in,
            base,
            new,
        }
    }
}

/// The groups that were live at a peak, by category alone if the other peak has no lines of code.
fn groups(peak: &Option<RecordedPeak>, other: &Option<RecordedPeak>) -> Vec<LiveGroup> {
    let Some(peak) = peak else {
        return Vec::new();
    };
    let only_categories = |peak: &RecordedPeak| peak.live.is_empty();
    if !only_categories(peak) && !other.as_ref().is_some_and(only_categories) {
        return peak.live.clone();
    }
    let categories = peak.by_category.iter();
    let group = |(category, bytes): (&String, &u64)| LiveGroup {
        place: category.clone(),
        line: None,
        category: category.clone(),
        bytes: *bytes,
        count: 0,
    };
    categories.map(group).collect()
}

/// A function's groups of one category, by line.
type Lines = BTreeMap<Option<u32>, (u64, u64)>;

fn by_function(groups: &[LiveGroup]) -> BTreeMap<(String, String), Lines> {
    let mut functions: BTreeMap<(String, String), Lines> = BTreeMap::new();
    for group in groups {
        let function = functions.entry((all_blocks(&group.place), group.category.clone()));
        let (bytes, count) = function.or_default().entry(group.line).or_default();
        (*bytes, *count) = (*bytes + group.bytes, *count + group.count);
    }
    functions
}

/// A place in one block of a model, as `forward, block 3 act`, stands for that place in all blocks.
fn all_blocks(place: &str) -> String {
    let Some((before, rest)) = place.split_once(", block ") else {
        return place.into();
    };
    match rest.trim_start_matches(|letter: char| letter.is_ascii_digit()) {
        after if after != rest => format!("{before}, blocks{after}"),
        _ => place.into(),
    }
}

/// What differs in bytes, what grew most first. A change of a file moves the lines below it, so a function whose sum is the same is
/// no change, and one that has other lines than before is compared as a whole.
fn changes(base: &[LiveGroup], new: &[LiveGroup]) -> Vec<GroupChange> {
    let (base, new) = (by_function(base), by_function(new));
    let functions: BTreeSet<_> = base.keys().chain(new.keys()).collect();
    let none = Lines::new();
    let mut changes = Vec::new();
    for function in functions {
        let [was, is] = [&base, &new].map(|side| side.get(function).unwrap_or(&none));
        if sum(was).0 == sum(is).0 {
            continue;
        }
        let change = |lines: Vec<u32>, was: (u64, u64), is: (u64, u64)| GroupChange {
            place: function.0.clone(),
            lines,
            category: function.1.clone(),
            base_bytes: was.0,
            new_bytes: is.0,
            base_count: was.1,
            new_count: is.1,
        };
        if was.keys().eq(is.keys()) {
            let lines = was.iter().filter(|(line, was)| is[*line].0 != was.0);
            changes.extend(
                lines.map(|(line, was)| change(line.iter().copied().collect(), *was, is[line])),
            );
        } else {
            let named = if is.is_empty() { was } else { is };
            changes.push(change(
                named.keys().flatten().copied().collect(),
                sum(was),
                sum(is),
            ));
        }
    }
    let growth =
        |change: &GroupChange| i128::from(change.new_bytes) - i128::from(change.base_bytes);
    changes.sort_by_key(|change| std::cmp::Reverse(growth(change)));
    changes
}

fn sum(lines: &Lines) -> (u64, u64) {
    let add = |sum: (u64, u64), line: &(u64, u64)| (sum.0 + line.0, sum.1 + line.1);
    lines.values().fold((0, 0), add)
}
