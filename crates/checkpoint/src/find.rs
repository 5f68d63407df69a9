//! The checkpoint to go on from.

use crate::agree::gather;
use crate::error::CheckpointError;
use crate::names::{self, Name};
use crate::open::Checkpoint;
use collectives::{Alone, Group};
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
    find_together(path, &Alone)
}

/// The same for all ranks of a group, which divide the work of verifying.
///
/// # Errors
/// As [`find`], and [`CheckpointError::OtherRank`].
pub fn find_together(path: &Path, group: &dyn Group) -> Result<Found, CheckpointError> {
    let path = match path.file_name() {
        Some(name) if name == "checkpoints" => path.parent().unwrap_or(path),
        _ => path,
    };
    let checkpoints = names::checkpoints(path);
    // The first rank's word counts: another may see a folder later.
    let listed = match group.rank() {
        0 => list(path, &checkpoints),
        _ => Ok(None),
    };
    let Some(names) = gather(group, listed)?.swap_remove(0) else {
        let checkpoint = Checkpoint::open_together(path, group)?;
        return Ok(Found {
            checkpoint,
            passed_over: Vec::new(),
        });
    };
    let mut passed_over = Vec::new();
    for name in names {
        match Checkpoint::open_together(&checkpoints.join(name), group) {
            Ok(checkpoint) => {
                return Ok(Found {
                    checkpoint,
                    passed_over,
                });
            }
            Err(error @ (CheckpointError::Newer { .. } | CheckpointError::Group(_))) => {
                return Err(error);
            }
            Err(error) => passed_over.push(error),
        }
    }
    Err(CheckpointError::NoneWhole {
        run: path.into(),
        passed_over,
    })
}

/// The names of a run's checkpoints, newest first; none if the folder is no run's.
fn list(path: &Path, checkpoints: &Path) -> Result<Option<Vec<String>>, CheckpointError> {
    // A run that has saved nothing yet has its metrics all the same.
    if !checkpoints.is_dir() && !path.join("metrics.jsonl").is_file() {
        return Ok(None);
    }
    let mut names = names::list(&Disk, checkpoints)?;
    names.retain(|name| matches!(name, Name::Saved(_) | Name::Old(_)));
    names.sort_by_key(|&name| match name {
        Name::Saved(step) => (step, true),
        Name::Old(step) | Name::Temporary(step) | Name::Removed(step) => (step, false),
    });
    Ok(Some(names.into_iter().rev().map(Name::text).collect()))
}
