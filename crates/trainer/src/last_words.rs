//! The file that a failing rank writes into the run directory, for other ranks and for users.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Why a rank failed: `rank-R.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LastWords {
    /// The rank.
    pub rank: usize,
    /// What messages call it: its number, and its place in the grid of ranks.
    pub name: String,
    /// The reason, in a sentence.
    pub reason: String,
    /// The exit code of the failure.
    pub exit_code: u8,
    /// Number of steps made.
    pub step: usize,
    /// Number of its micro-batches that were asked for in the next step.
    pub micro_batches: usize,
    /// Its host.
    pub hostname: String,
    /// Whether it failed only because other ranks were lost.
    pub lost_others: bool,
}

impl std::fmt::Display for LastWords {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(
            f,
            "rank {} ({}) failed{}: {}",
            self.name,
            self.hostname,
            when(self.step, self.micro_batches),
            self.reason
        )
    }
}

/// When something happened to a rank that had made so many steps, and so many micro-batches of the next; nothing before any.
pub(crate) fn when(steps: usize, micro_batches: usize) -> String {
    match (steps, micro_batches) {
        (0, 0) => String::new(),
        (_, 0) => format!(" after step {steps}"),
        _ => format!(
            " in step {}, after its micro-batch {micro_batches}",
            steps + 1
        ),
    }
}

/// Removes the files of an earlier attempt's ranks.
pub(crate) fn forget(directory: &Path) {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let rank = name
            .to_str()
            .and_then(|name| name.strip_prefix("rank-")?.strip_suffix(".json"));
        if rank.is_some_and(|rank| rank.parse::<usize>().is_ok()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// The path of a rank's file.
pub(crate) fn file(directory: &Path, rank: usize) -> PathBuf {
    directory.join(format!("rank-{rank}.json"))
}

/// The name of this machine.
pub(crate) fn hostname() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "a machine without a name".into(),
        name => name.into(),
    }
}
