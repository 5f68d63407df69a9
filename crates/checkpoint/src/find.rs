//! The checkpoint to go on from.

use crate::error::CheckpointError;
use crate::names::{self, Name};
use crate::open::Checkpoint;
use files::Disk;
use std::path::Path;

/// A whole checkpoint.
#[derive(Debug)]
pub struct Found {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// Newer ones that are not whole, newest first, each with its path and the reason.
    pub passed_over: Vec<CheckpointError>,
}

/// Opens a checkpoint's folder; or of a run's folder the newest checkpoint that is whole.
///
/// # Errors
/// As [`Checkpoint::open`]; for a run [`CheckpointError::NoneWhole`], and [`CheckpointError::Newer`] if its newest is of a
/// later format: to go back silently would lose work.
pub fn find(path: &Path) -> Result<Found, CheckpointError> {
    let path = match path.file_name() {
        Some(name) if name == "checkpoints" => path.parent().unwrap_or(path),
        _ => path,
    };
    let checkpoints = names::checkpoints(path);
    // A run that has saved nothing yet has its metrics all the same.
    if !checkpoints.is_dir() && !path.join("metrics.jsonl").is_file() {
        let checkpoint = Checkpoint::open(path)?;
        return Ok(Found {
            checkpoint,
            passed_over: Vec::new(),
        });
    }
    let mut names = names::list(&Disk, &checkpoints)?;
    names.retain(|name| matches!(name, Name::Saved(_) | Name::Old(_)));
    names.sort_by_key(|&name| match name {
        Name::Saved(step) => (step, true),
        Name::Old(step) | Name::Temporary(step) | Name::Removed(step) => (step, false),
    });
    let mut passed_over = Vec::new();
    for name in names.into_iter().rev() {
        match Checkpoint::open(&checkpoints.join(name.text())) {
            Ok(checkpoint) => {
                return Ok(Found {
                    checkpoint,
                    passed_over,
                });
            }
            Err(error @ CheckpointError::Newer { .. }) => return Err(error),
            Err(error) => passed_over.push(error),
        }
    }
    Err(CheckpointError::NoneWhole {
        run: path.into(),
        passed_over,
    })
}
