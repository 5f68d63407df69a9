//! The peaks in a file: a snapshot, `metrics.jsonl` or `plan.json`.

use crate::frames::printable;
use crate::peak::{LiveGroup, RecordedPeak, ReservedMemory};
use crate::snapshot::{MemorySnapshot, SnapshotError};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// The largest plan that is read.
const PLAN_BYTES_MAX: u64 = 64 << 20;

/// The longest line of metrics that is read.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// Why a file has no peak.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read.
    #[error("{0}")]
    Read(#[from] std::io::Error),
    /// It looks like a snapshot and is none.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// It is something else.
    #[error(
        "it is neither a memory snapshot of PyTorch or of --trace, nor a metrics.jsonl, nor a plan.json: {0}"
    )]
    Foreign(String),
}

/// The peaks in a file, by device.
///
/// # Errors
/// [`RecordError`].
pub fn peaks(path: &Path) -> Result<Vec<RecordedPeak>, RecordError> {
    let mut input = BufReader::new(File::open(path)?);
    match input.fill_buf()?.first() {
        None => Err(RecordError::Foreign("it is empty".into())),
        Some(b'{') => match of_whole(path)? {
            Some(plan) => Ok(vec![of_plan(&plan)]),
            None => of_lines(input),
        },
        Some(_) => Ok(MemorySnapshot::read(input)?.peaks()?),
    }
}

/// A plan, if the file is one.
fn of_whole(path: &Path) -> Result<Option<Value>, RecordError> {
    let mut text = Vec::new();
    File::open(path)?
        .take(PLAN_BYTES_MAX)
        .read_to_end(&mut text)?;
    let plan = serde_json::from_slice::<Value>(&text).ok();
    Ok(plan.filter(|plan| plan["peak_bytes"].is_u64() && plan["kind"].is_null()))
}

/// The peak of the step of a run that took most. A run that was killed leaves half a line, as the last one.
fn of_lines(mut input: impl BufRead) -> Result<Vec<RecordedPeak>, RecordError> {
    let (mut most, mut broken, mut number) = (None::<Value>, None, 0);
    loop {
        let mut line = Vec::new();
        let read = input
            .by_ref()
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut line)?;
        if read == 0 {
            break;
        }
        number += 1;
        if let Some(broken) = broken {
            return Err(RecordError::Foreign(format!("line {broken} is no JSON")));
        }
        let Ok(record) = serde_json::from_slice::<Value>(&line) else {
            broken = Some(number);
            continue;
        };
        let bytes = |step: &Value| step["peak_bytes"].as_u64();
        let is_more = most
            .as_ref()
            .is_none_or(|most| bytes(&record) > bytes(most));
        if record["kind"] == "step" && bytes(&record).is_some() && is_more {
            most = Some(record);
        }
    }
    let most =
        most.ok_or_else(|| RecordError::Foreign("it has no `peak_bytes` and no steps".into()))?;
    Ok(vec![of_step(&most)])
}

fn by_category(record: &Value) -> BTreeMap<String, u64> {
    let categories = record["peak_by_category"].as_object().into_iter().flatten();
    let sized = categories.filter_map(|(name, bytes)| Some((printable(name), bytes.as_u64()?)));
    sized.filter(|(_, bytes)| *bytes > 0).collect()
}

/// The phase and the layer, as `at`, `name` or both are recorded.
fn place(record: &Value, phase: &str, layer: &str) -> String {
    let phase = printable(record[phase].as_str().unwrap_or("a step"));
    match &record[layer] {
        Value::Number(block) => format!("{phase}, block {block}"),
        Value::String(layer) => format!("{phase}, {}", printable(layer)),
        _ => phase,
    }
}

fn of_plan(plan: &Value) -> RecordedPeak {
    let mut groups: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
    for lease in plan["largest_at_peak"].as_array().into_iter().flatten() {
        let text = |name: &str| printable(lease[name].as_str().unwrap_or("unknown"));
        let place = format!("{} ({})", text("name"), place(lease, "phase", "layer"));
        let (bytes, count) = groups.entry((place, text("category"))).or_default();
        *bytes = bytes.saturating_add(lease["bytes"].as_u64().unwrap_or(0));
        *count += 1;
    }
    let mut live: Vec<LiveGroup> = groups
        .into_iter()
        .map(|((place, category), (bytes, count))| LiveGroup {
            place,
            line: None,
            category,
            bytes,
            count,
        })
        .collect();
    live.sort_by_key(|group| std::cmp::Reverse(group.bytes));
    RecordedPeak {
        device: 0,
        peak_bytes: plan["peak_bytes"].as_u64().unwrap_or(0),
        at: format!("in {}", place(plan, "peak_phase", "peak_layer")),
        counted: "The plan's peak: every lease of a step, to the byte.".into(),
        is_recorded: true,
        waiting_bytes: 0,
        by_category: by_category(plan),
        live,
        reserved: None,
    }
}

fn of_step(step: &Value) -> RecordedPeak {
    let reserved = step["device_reserved_high_bytes"].as_u64();
    RecordedPeak {
        device: 0,
        peak_bytes: step["peak_bytes"].as_u64().unwrap_or(0),
        at: format!(
            "in step {}: {}",
            step["step"],
            place(step, "peak_phase", "peak_layer")
        ),
        counted: "The highest of the steps' measured peaks, to the byte.".into(),
        is_recorded: true,
        waiting_bytes: 0,
        by_category: by_category(step),
        live: Vec::new(),
        reserved: reserved
            .filter(|bytes| *bytes > 0)
            .map(|bytes| ReservedMemory {
                peak_bytes: bytes,
                at_peak_bytes: bytes,
                ..ReservedMemory::default()
            }),
    }
}
