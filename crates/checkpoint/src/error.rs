//! Why a checkpoint cannot be written or read.

use collectives::GroupError;
use files::FilesError;
use std::path::PathBuf;

/// A checkpoint cannot be saved, found or loaded.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file cannot be written or read.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The system gave no thread to write in.
    #[error("no thread to write it in: {0}")]
    Thread(std::io::Error),
    /// Another rank, with which it is saved or opened, failed.
    #[error("rank {rank}: {reason}")]
    OtherRank {
        /// The rank.
        rank: usize,
        /// Why.
        reason: String,
        /// Whether it had no room.
        is_full: bool,
    },
    /// Other ranks cannot be reached.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// A folder is no whole checkpoint.
    #[error("`{}` is not a whole checkpoint: {damage}", path.display())]
    Damaged {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        damage: Damage,
    },
    /// A checkpoint of a later program.
    #[error(
        "`{}` has format version {found}, and this program reads up to {known}; use the trainer that wrote it, or a later one",
        path.display()
    )]
    Newer {
        /// The folder.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The latest version known here.
        known: u64,
    },
    /// A run has no checkpoint that could be loaded.
    #[error(
        "`{}` has no whole checkpoint to go on from{}",
        run.display(),
        listed(passed_over)
    )]
    NoneWhole {
        /// The run's folder.
        run: PathBuf,
        /// Those that it has, and what is wrong with them.
        passed_over: Vec<CheckpointError>,
    },
}

impl CheckpointError {
    /// Whether host memory is all that was missing.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, CheckpointError::Files(error) if error.is_out_of_memory())
    }

    /// Whether there was no room for what was to be written. What was half written is removed, and earlier checkpoints are
    /// untouched, so that training can go on.
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
pub enum Damage {
    /// Without a manifest nothing can be trusted.
    #[error(
        "it has no `manifest.json`; either it is no checkpoint at all, or its save was cut short"
    )]
    NoManifest,
    /// The manifest does not fit its own checksum, or says what none can.
    #[error("its `manifest.json` is damaged ({0})")]
    Manifest(String),
    /// A file is not there.
    #[error("`{0}` is missing")]
    Missing(String),
    /// A file has another size.
    #[error("`{name}` has {found} bytes instead of {expected}")]
    Size {
        /// The file.
        name: String,
        /// Bytes by the manifest.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// A file has other bytes.
    #[error("`{0}` was changed: its checksum is not the manifest's")]
    Changed(String),
    /// A file has what belongs to another.
    #[error("`{name}` holds what belongs into `{other}`")]
    Swapped {
        /// The file.
        name: String,
        /// The file whose content it has.
        other: String,
    },
    /// A file is not the checkpoint's.
    #[error("`{0}` does not belong to it; move that elsewhere")]
    Extra(String),
    /// The folder has the name of another step.
    #[error("its name says step {name}, but it is of step {step}")]
    OtherStep {
        /// What its name says.
        name: u64,
        /// What its content says.
        step: u64,
    },
    /// The state cannot be understood.
    #[error("its `trainer_state.json` cannot be read ({0})")]
    State(String),
}
