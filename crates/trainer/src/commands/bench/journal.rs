//! Stores a matrix's measurements as they are made, so that an interrupted matrix can continue.

use super::matrix::BenchStrategy;
use super::measure::BenchRun;
use crate::failure::{Failure, Result};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The runs of a matrix, in the order in which they were made.
#[derive(Debug)]
pub(crate) struct Journal {
    path: Option<PathBuf>,
    contents: Contents,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Contents {
    /// What was measured: the measurements of another matrix are not used.
    asked: String,
    runs: Vec<JournalEntry>,
}

/// A run of a strategy in a round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct JournalEntry {
    pub(crate) strategy: String,
    pub(crate) round: usize,
    pub(crate) run: BenchRun,
}

impl Journal {
    /// Opens the journal for the matrix `asked`. It is empty if there is no file yet.
    ///
    /// # Errors
    /// If the file cannot be read, or belongs to another matrix.
    pub(crate) fn open(path: Option<PathBuf>, asked: String) -> Result<Journal> {
        let text = match &path {
            Some(path) => match files::read_small_text(path) {
                Ok(text) => Some(text),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
                Err(error) => return Err(Failure::file(path)(error)),
            },
            None => None,
        };
        let contents = match text {
            None => Contents {
                asked,
                runs: Vec::new(),
            },
            Some(text) => {
                let refused = |why: &str| {
                    let path = path
                        .iter()
                        .map(|path| path.display().to_string())
                        .collect::<String>();
                    Failure::Usage(format!(
                        "--continue {path}: {why}; name another file, or remove it"
                    ))
                };
                let found: Contents = serde_json::from_str(&text).map_err(|error| {
                    refused(&format!("it holds no measurements of bench ({error})"))
                })?;
                if found.asked != asked {
                    return Err(refused(
                        "it holds measurements of another matrix, other settings or another version",
                    ));
                }
                found
            }
        };
        Ok(Journal { path, contents })
    }

    pub(crate) fn runs(&self) -> &[JournalEntry] {
        &self.contents.runs
    }

    /// Whether a strategy was measured in a round, or failed in any: it would fail again.
    pub(crate) fn has(&self, strategy: &BenchStrategy, round: usize) -> bool {
        let of_strategy = |entry: &&JournalEntry| entry.strategy == strategy.name;
        let mut runs = self.runs().iter().filter(of_strategy);
        runs.any(|entry| entry.round == round || entry.run.figures.is_none())
    }

    /// Adds a run and writes the journal to its file, if it has one. An interruption leaves a complete file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn add(&mut self, entry: JournalEntry) -> Result {
        self.contents.runs.push(entry);
        let Some(path) = &self.path else {
            return Ok(());
        };
        let json = serde_json::to_string_pretty(&self.contents);
        let json = json.map_err(|error| Failure::Usage(error.to_string()))?;
        let partial = path.with_extension("partial");
        std::fs::write(&partial, json).map_err(Failure::file(&partial))?;
        std::fs::rename(&partial, path).map_err(Failure::file(path))
    }
}
