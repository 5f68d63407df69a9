//! Errors of pages.

use std::path::PathBuf;

/// Why no page could be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum PageError {
    /// A folder without files of a run.
    #[error(
        "{0} is no run directory: it has neither metrics.jsonl nor plan.json nor config.toml; name a folder that `trainer \
         train` wrote, such as one under runs/"
    )]
    NoRun(PathBuf),
    /// A file that cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    /// A file with invalid contents.
    #[error("{path} is damaged, so there is no report of this run: {reason}")]
    Malformed { path: PathBuf, reason: String },
    /// A file that cannot be written.
    #[error("cannot write {path}: {source}")]
    Write {
        path: PathBuf,
        source: std::io::Error,
    },
    /// The template is invalid, which is a defect.
    #[error("the template of the report is wrong: {0}")]
    Template(#[from] minijinja::Error),
}
