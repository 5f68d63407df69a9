//! Writes a rank's last words, and reads those of others.

use super::Rank;
use crate::failure::Failure;
use crate::last_words::{LastWords, file, hostname};
use std::sync::atomic::Ordering;

impl Rank {
    /// The last words for a failure.
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

    /// Writes them, if the run has a directory. A failure to write is ignored: the original failure is reported.
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

    /// The first of the other ranks whose last words name a failure of its own.
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
