//! Figures of a run as tables, from its records.

use super::run_files::RunFiles;
use super::view::{Bar, BarPiece};
use crate::Align::{Left, Right};
use crate::Table;
use crate::numbers::{difference, exact};
use memory::{Category, Phase, format_bytes};
use serde_json::Value;

/// Number of the largest tensors that are listed.
const LARGEST: usize = 15;

/// What a step needs besides the device's memory, by the names of the fields.
const ELSEWHERE: [(&str, &str); 6] = [
    ("host memory, offloaded", "host_pinned_bytes"),
    ("copied to the device", "h2d_bytes"),
    ("copied to the host", "d2h_bytes"),
    ("read from the disk", "disk_read_bytes"),
    ("written to the disk", "disk_written_bytes"),
    ("sent to other ranks", "sent_bytes"),
];

/// Peak, peak by category and peak by phase of a plan or a step, in the order of every report; then its other needs.
pub(super) fn memory_rows(record: &Value) -> Vec<(String, Option<u64>)> {
    let categories = Category::ALL.map(|category| {
        let name = category.name();
        (
            format!("  {name}"),
            record["peak_by_category"][name].as_u64(),
        )
    });
    let phases = Phase::ALL.map(|phase| {
        let name = phase.name();
        (
            format!("peak in {name}"),
            record["phase_peak_bytes"][name].as_u64(),
        )
    });
    let elsewhere = ELSEWHERE.map(|(name, field)| (name.to_string(), record[field].as_u64()));
    let first = [("peak".to_string(), record["peak_bytes"].as_u64())];
    let on_device = first.into_iter().chain(categories).chain(phases);
    on_device.chain(elsewhere).collect()
}

/// Compares the memory of two records, to the byte, with the second also rounded, and with the peaks of evaluations.
/// Rows that are 0 in both are left out.
pub(super) fn memory_beside(
    heads: [&str; 3],
    one: &Value,
    other: &Value,
    evaluation: [&Value; 2],
) -> Table {
    let mut table = Table::new(&["bytes"], &[heads[0], heads[1], "difference", heads[2]]);
    let cell = |bytes: Option<u64>| bytes.map_or(String::new(), exact);
    let rows = memory_rows(one).into_iter().zip(memory_rows(other));
    let evaluation = evaluation.map(|peak| ("peak in an evaluation".to_string(), peak.as_u64()));
    let [one, other] = evaluation;
    for ((name, one), (_, other)) in rows.chain([(one, other)]) {
        if one.unwrap_or(0) == 0 && other.unwrap_or(0) == 0 {
            continue;
        }
        let differs = one
            .zip(other)
            .map_or(String::new(), |(one, other)| difference(one, other));
        let readable = other.or(one).map_or(String::new(), format_bytes);
        table.row([name, cell(one), cell(other), differs, readable]);
    }
    table
}

/// The device's own figures of its memory at its fullest; none if it has none.
pub(super) fn device_account(step: &Value) -> Option<Table> {
    const MARKS: [(&str, &str); 3] = [
        ("device_used_high_bytes", "used of the pool, at most"),
        (
            "device_reserved_high_bytes",
            "reserved by the pool, at most",
        ),
        (
            "device_total_used_bytes",
            "used on the whole device, other processes too",
        ),
    ];
    let mut table = Table::new(&["the device's own account"], &["bytes", "rounded"]);
    let marks = MARKS
        .iter()
        .filter_map(|(field, name)| Some((name, step[*field].as_u64()?)));
    let marks: Vec<_> = marks.filter(|(_, bytes)| *bytes > 0).collect();
    for (name, bytes) in &marks {
        table.row([(**name).to_string(), exact(*bytes), format_bytes(*bytes)]);
    }
    (!marks.is_empty()).then_some(table)
}

/// Tensors that are live at once, largest first.
pub(super) fn largest(leases: &Value) -> Option<Table> {
    let leases = leases.as_array().filter(|leases| !leases.is_empty())?;
    let mut table = Table::new(&["tensor", "category", "leased in"], &["bytes", "rounded"]);
    for lease in leases.iter().take(LARGEST) {
        let bytes = lease["bytes"].as_u64().unwrap_or(0);
        table.row([
            word(&lease["name"]),
            word(&lease["category"]),
            place(&lease["phase"], &lease["layer"]),
            exact(bytes),
            format_bytes(bytes),
        ]);
    }
    let bytes = |lease: &Value| lease["bytes"].as_u64().unwrap_or(0);
    if let Some(rest) = leases.get(LARGEST..).filter(|rest| !rest.is_empty()) {
        let sum = rest.iter().map(bytes).sum();
        let name = format!("{} smaller ones", rest.len());
        table.row([
            name,
            String::new(),
            String::new(),
            exact(sum),
            format_bytes(sum),
        ]);
    }
    Some(table)
}

/// A stacked bar of a record's peak by category. Its length is in proportion to `longest`.
pub(super) fn bar(name: &'static str, record: &Value, longest: u64) -> Option<Bar> {
    let piece = |category: Category| {
        let bytes = record["peak_by_category"][category.name()].as_u64()?;
        (bytes > 0).then(|| BarPiece {
            category: category.name(),
            percent: 100.0 * bytes as f64 / longest.max(1) as f64,
            bytes: format_bytes(bytes),
        })
    };
    Some(Bar {
        name,
        total: format_bytes(record["peak_bytes"].as_u64()?),
        pieces: Category::ALL.into_iter().filter_map(piece).collect(),
    })
}

/// Other recompute specifications, from the plan.
#[rustfmt::skip]
pub(super) fn strategies(run: &RunFiles) -> Option<Table> {
    let strategies = run.plan["strategies"].as_array()?;
    let own = run.plan["peak_bytes"].as_u64().unwrap_or(0);
    let bytes = |strategy: &Value| strategy["peak_bytes"].as_u64().unwrap_or(0);
    let mark = |strategy: &Value| if is_own(run, strategy) { "this run" } else { "" };
    let table = Table::of_items(strategies, &[
        ("recompute", Left, &|one| word(&one["recompute"])),
        ("offload", Left, &|one| word(&one["offload_activations"])),
        ("planned peak", Right, &|one| format_bytes(bytes(one))),
        ("against this run, bytes", Right, &|one| difference(own, bytes(one))),
        ("extra FLOPs", Right, &|one| percent(&one["recompute_flops_fraction"])),
        ("", Left, &|one| mark(one).into()),
    ]);
    (!strategies.is_empty()).then_some(table)
}

/// Whether a strategy is the run's own.
pub(super) fn is_own(run: &RunFiles, strategy: &Value) -> bool {
    let key = |section: &str, name: &str| {
        let value = run.config.get(section).and_then(|keys| keys.get(name));
        value
            .and_then(toml::Value::as_str)
            .unwrap_or_default()
            .to_string()
    };
    strategy["recompute"] == key("recompute", "spec").as_str()
        && strategy["offload_activations"] == key("offload", "activations").as_str()
        && strategy["peak_bytes"] == run.plan["peak_bytes"]
}

/// The effects of single other settings, from the plan.
#[rustfmt::skip]
pub(super) fn effects(run: &RunFiles) -> Option<Table> {
    let effects = run.plan["effects"]
        .as_array()
        .filter(|effects| !effects.is_empty())?;
    let own = run.plan["peak_bytes"].as_u64().unwrap_or(0);
    let bytes = |effect: &Value| effect["peak_bytes"].as_u64().unwrap_or(0);
    Some(Table::of_items(effects, &[
        ("one other setting", Left, &|effect| word(&effect["change"])),
        ("planned peak", Right, &|effect| format_bytes(bytes(effect))),
        ("against this run, bytes", Right, &|effect| difference(own, bytes(effect))),
    ]))
}

/// Fixes of an out-of-memory error, cheapest first.
#[rustfmt::skip]
pub(super) fn fixes(oom: &Value) -> Option<Table> {
    let fixes = oom["fixes"].as_array().filter(|fixes| !fixes.is_empty())?;
    let flags = |fix: &Value| {
        let set = fix["set"].as_array().into_iter().flatten();
        let flags: Vec<String> = set.map(|one| format!("--set {}", word(one))).collect();
        flags.join(" ")
    };
    let bytes = |fix: &Value, name: &str| format_bytes(fix[name].as_u64().unwrap_or(0));
    let loss = |fix: &Value| match fix["changes_math"].as_bool() {
        Some(true) => "other bits",
        _ => "bitwise the same",
    };
    Some(Table::of_items(fixes, &[
        ("add to the command", Left, &flags),
        ("peak", Right, &|fix| bytes(fix, "peak_bytes")),
        ("saves", Right, &|fix| bytes(fix, "saves_bytes")),
        ("time on paper", Right, &|fix| percent(&fix["cost_fraction"])),
        ("the loss", Left, &|fix| loss(fix).into()),
    ]))
}

/// A place in words, such as `backward, block 3`.
pub(super) fn place(phase: &Value, layer: &Value) -> String {
    let layer = match layer {
        Value::Number(number) => format!("block {number}"),
        other => word(other),
    };
    [word(phase), layer]
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(", ")
}

/// A value without quotes; empty for null.
pub(super) fn word(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn percent(fraction: &Value) -> String {
    fraction.as_f64().map_or(String::new(), |fraction| {
        format!("{:.1} %", 100.0 * fraction)
    })
}
