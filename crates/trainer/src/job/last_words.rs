//! Writes a rank's last words, and reads those of others.

use super::OfJob;
use crate::failure::Failure;
use crate::last_words::{LastWords, file, hostname, when};
use collectives::GroupError;
use memory::Rank;
use std::sync::atomic::Ordering;

impl OfJob {
    /// The last words for a failure.
    pub(super) fn words(&self, failure: &Failure) -> LastWords {
        LastWords {
            rank: self.group.rank(),
            name: self.name(),
            reason: failure.to_string(),
            exit_code: failure.exit_code(),
            step: self.step.load(Ordering::Relaxed),
            micro_batches: self.micro_batches.load(Ordering::Relaxed),
            hostname: hostname(),
            lost_others: matches!(failure, Failure::Ranks(_) | Failure::LostRank { .. }),
        }
    }

    /// What messages call this rank.
    fn name(&self) -> String {
        self.parallel.name(Rank {
            number: self.group.rank(),
            of: self.group.size(),
        })
    }

    /// The engine's error, with the step in which this rank met it.
    pub(super) fn met(&self, error: GroupError) -> GroupError {
        let counts = [&self.step, &self.micro_batches].map(|count| count.load(Ordering::Relaxed));
        match (error, when(counts[0], counts[1])) {
            (GroupError::Late(reason), when) if !when.is_empty() => {
                GroupError::Late(format!("{reason}; rank {} was there{when}", self.name()))
            }
            (error, _) => error,
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
            let text = files::read_small_text(&file(directory, rank)).ok()?;
            serde_json::from_str::<LastWords>(&text).ok()
        });
        words.into_iter().find(|words| !words.lost_others)
    }
}
