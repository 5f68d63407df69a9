//! Errors of writing and reading checkpoints.

use collectives::GroupError;
use files::FilesError;
use std::path::PathBuf;

/// A result with a [`CheckpointError`], unless another error is named.
pub type Result<T = (), E = CheckpointError> = std::result::Result<T, E>;

/// A checkpoint cannot be saved, found or loaded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum CheckpointError {
    /// A file cannot be written or read.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The system has no thread for writing.
    #[error("no thread to write it in: {0}")]
    Thread(std::io::Error),
    /// Another rank failed while all ranks saved or opened it.
    #[error("rank {rank}: {reason}")]
    OtherRank {
        rank: usize,
        reason: String,
        is_full: bool,
    },
    /// Other ranks cannot be reached.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// A folder is not a whole checkpoint.
    #[error("`{}` is not a whole checkpoint: {damage}", path.display())]
    Damaged { path: PathBuf, damage: Damage },
    /// A checkpoint of a later version.
    #[error(
        "`{}` has format version {found}, and this program reads up to {known}; use the trainer that wrote it, or a later one",
        path.display()
    )]
    Newer {
        path: PathBuf,
        found: u64,
        known: u64,
    },
    /// A run has no whole checkpoint.
    #[error(
        "`{}` has no whole checkpoint to go on from{}",
        run.display(),
        listed(passed_over)
    )]
    NoneWhole {
        run: PathBuf,
        passed_over: Vec<CheckpointError>,
    },
}

impl CheckpointError {
    /// Whether the only problem was too little host memory.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, CheckpointError::Files(error) if error.is_out_of_memory())
    }

    /// Whether the disk was full. What was half written has been removed, and earlier checkpoints are untouched, so
    /// training can continue.
    pub fn is_full(&self) -> bool {
        match self {
            CheckpointError::Files(error) => error.is_full(),
            CheckpointError::OtherRank { is_full, .. } => *is_full,
            _ => false,
        }
    }
}

fn listed(passed_over: &[CheckpointError]) -> String {
    passed_over
        .iter()
        .map(|error| format!("; {error}"))
        .collect()
}

/// What is wrong with a checkpoint's folder.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum Damage {
    /// There is no manifest, so nothing can be trusted.
    #[error(
        "it has no `manifest.json`; either it is no checkpoint at all, or its save was cut short"
    )]
    NoManifest,
    /// The manifest does not match its own checksum, or is invalid.
    #[error("its `manifest.json` is damaged ({0})")]
    Manifest(String),
    /// A file is missing.
    #[error("`{0}` is missing")]
    Missing(String),
    /// A file has another size.
    #[error("`{name}` has {found} bytes instead of {expected}")]
    Size {
        name: String,
        expected: u64,
        found: u64,
    },
    /// A file's bytes have changed.
    #[error("`{0}` was changed: its checksum is not the manifest's")]
    Changed(String),
    /// A file has the contents of another one.
    #[error("`{name}` holds what belongs into `{other}`")]
    Swapped { name: String, other: String },
    /// A file does not belong to the checkpoint.
    #[error("`{0}` does not belong to it; move that elsewhere")]
    Extra(String),
    /// The folder's name is that of another step.
    #[error("its name says step {name}, but it is of step {step}")]
    OtherStep { name: u64, step: u64 },
    /// The state is invalid.
    #[error("its `trainer_state.json` cannot be read ({0})")]
    State(String),
}
