//! What a rank leaves behind that fails: a file in the run directory, for the other ranks and for people.

use super::Rank;
use crate::failure::Failure;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// Why a rank failed: `rank-R.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LastWords {
    /// Which one.
    pub rank: usize,
    /// Why, in a sentence.
    pub reason: String,
    /// The exit code that goes with it.
    pub exit_code: u8,
    /// Steps made.
    pub step: usize,
    /// Where it ran.
    pub hostname: String,
    /// It only saw that other ranks are lost.
    pub lost_others: bool,
}

impl From<LastWords> for Failure {
    fn from(words: LastWords) -> Failure {
        Failure::OtherRank(Box::new(words))
    }
}

impl std::fmt::Display for LastWords {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(
            f,
            "rank {} ({}) failed: {}",
            self.rank, self.hostname, self.reason
        )
    }
}

impl Rank {
    /// What there is to say of a failure.
    pub(super) fn words(&self, failure: &Failure) -> LastWords {
        LastWords {
            rank: self.group.rank(),
            reason: failure.to_string(),
            exit_code: failure.exit_code(),
            step: self.step.load(Ordering::Relaxed),
            hostname: hostname(),
            lost_others: matches!(failure, Failure::Ranks(_) | Failure::LostRank { .. }),
        }
    }

    /// Writes them down, once the run has a directory. That they could not be is no reason to end otherwise.
    pub(super) fn leave(&self, words: LastWords) {
        let Some(directory) = self.directory.get() else {
            return;
        };
        let path = file(directory, words.rank);
        let written = serde_json::to_string_pretty(&words)
            .map_err(std::io::Error::from)
            .and_then(|json| std::fs::write(&path, json + "\n"));
        if let Err(error) = written {
            tracing::warn!("cannot write {}: {error}", path.display());
        }
    }

    /// The first of the other ranks that left word of a failure of its own.
    pub(super) fn culprit(&self) -> Option<LastWords> {
        let directory = self.directory.get()?;
        let others = (0..self.group.size()).filter(|rank| *rank != self.group.rank());
        let words = others.filter_map(|rank| {
            let text = std::fs::read_to_string(file(directory, rank)).ok()?;
            serde_json::from_str::<LastWords>(&text).ok()
        });
        words.into_iter().find(|words| !words.lost_others)
    }
}

/// Forgets what ranks of an earlier attempt left.
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

fn file(directory: &Path, rank: usize) -> PathBuf {
    directory.join(format!("rank-{rank}.json"))
}

/// What the system calls this machine.
pub(crate) fn hostname() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "a machine without a name".into(),
        name => name.into(),
    }
}
