//! The ranks of a run, each from the folder that it writes.

use super::run_files::RunFiles;
use super::view::{Section, SectionItem};
use crate::Table;
use crate::numbers::exact;
use memory::Rank;
use serde_json::Value;
use settings::ParallelConfig;

/// The peak and the traffic of every rank; nothing of a single one.
pub(super) fn ranks(run: &RunFiles) -> Section {
    let folder = run.folder.join("ranks");
    let folders = std::fs::read_dir(&folder).into_iter().flatten();
    let numbers = folders.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut numbers: Vec<usize> = numbers.collect();
    numbers.sort();
    let bytes = [
        "planned peak, bytes",
        "peak, bytes",
        "sent in a step, bytes",
    ];
    let mut table = Table::new(&["rank"], &[&["steps"], &bytes[..]].concat());
    let mut items = Vec::new();
    for number in &numbers {
        match RunFiles::read(&folder.join(number.to_string())) {
            Ok(own) => table.row(cells(*number, &own)),
            Err(error) => items.push(SectionItem::Say(format!("Rank {number}: {error}"))),
        }
    }
    items.insert(0, SectionItem::Table(table));
    Section::new("Ranks", if numbers.len() > 1 { items } else { Vec::new() })
}

/// The row of a rank, called by its number and its place in the grid.
fn cells(number: usize, own: &RunFiles) -> [String; 5] {
    let count = |name: &str| own.plan[name].as_u64().unwrap_or(1) as usize;
    let (context, pipeline, of) = (count("context"), count("pipeline"), count("ranks"));
    let bytes = |record: &Value, name: &str| record[name].as_u64().map_or(String::new(), exact);
    [
        ParallelConfig {
            context,
            context_parts: Some(count("context_parts")),
            pipeline,
            ..ParallelConfig::default()
        }
        .name(Rank { number, of }),
        own.steps.len().to_string(),
        bytes(&own.plan, "peak_bytes"),
        bytes(&own.peak_step, "peak_bytes"),
        bytes(&own.last_step, "sent_bytes"),
    ]
}
