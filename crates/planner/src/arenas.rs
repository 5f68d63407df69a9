//! The arenas that live across steps, with their bytes per parameter.

use report::Table;
use serde::Serialize;

/// One arena.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedArena {
    /// What it holds.
    pub name: &'static str,
    /// Its leased bytes.
    pub bytes: u64,
    /// Bytes divided by the number of parameters.
    pub bytes_per_parameter: f64,
}

/// Arenas from their names and bytes, for a model of `parameters`.
pub(crate) fn planned_arenas(
    arenas: Vec<(&'static str, u64)>,
    parameters: usize,
) -> Vec<PlannedArena> {
    let planned = |(name, bytes)| PlannedArena {
        name,
        bytes,
        bytes_per_parameter: bytes as f64 / parameters as f64,
    };
    arenas.into_iter().map(planned).collect()
}

/// Label for host memory; on the CPU it is not pinned.
pub fn host_memory(device: &str) -> &'static str {
    match device {
        "cpu" => "host memory",
        _ => "pinned host memory",
    }
}

/// The arenas as a table, with their sum.
pub fn arena_table(title: &str, arenas: &[PlannedArena]) -> Table {
    let mut table = Table::new(&[title], &["bytes", "a parameter"]);
    let mut row = |name: &str, bytes: u64, per_parameter: f64| {
        table.row([
            name.to_string(),
            memory::format_bytes(bytes),
            format!("{per_parameter:.3}"),
        ]);
    };
    for arena in arenas {
        row(arena.name, arena.bytes, arena.bytes_per_parameter);
    }
    let bytes = arenas.iter().map(|arena| arena.bytes).sum();
    let per_parameter = arenas.iter().map(|arena| arena.bytes_per_parameter).sum();
    row("total", bytes, per_parameter);
    table
}
