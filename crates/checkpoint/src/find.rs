//! Finds the checkpoint to resume from.

use crate::Result;
use crate::agree::gather;
use crate::error::CheckpointError;
use crate::names::{self, Name};
use crate::open::Checkpoint;
use collectives::{Alone, Group};
use files::Disk;
use std::path::{Path, PathBuf};

/// A whole checkpoint.
#[derive(Debug)]
pub struct WholeCheckpoint {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// Newer ones that are damaged, newest first, each with its path and the reason.
    pub passed_over: Vec<CheckpointError>,
}

/// Opens a checkpoint's folder, or the newest whole checkpoint in a run's folder.
///
/// # Errors
/// As [`Checkpoint::open`]. For a run [`CheckpointError::NoneWhole`], and [`CheckpointError::Newer`] if its newest
/// checkpoint has a later format, because silently using an older one would lose work.
pub fn find(path: &Path) -> Result<WholeCheckpoint> {
    find_together(path, &Alone)
}

/// The same for all ranks of a group, which divide the verification among themselves.
///
/// # Errors
/// As [`find`], and [`CheckpointError::OtherRank`].
pub fn find_together(path: &Path, group: &dyn Group) -> Result<WholeCheckpoint> {
    let path = run_of(path);
    let checkpoints = names::checkpoints(path);
    // All ranks use the first rank's list, because others may see a new folder later.
    let listed = match group.rank() {
        0 => list(path, &checkpoints),
        _ => Ok(None),
    };
    let Some(names) = gather(group, listed)?.swap_remove(0) else {
        let checkpoint = Checkpoint::open_together(path, group)?;
        return Ok(WholeCheckpoint {
            checkpoint,
            passed_over: Vec::new(),
        });
    };
    newest(path, names, group)?.ok_or_else(|| CheckpointError::NoneWhole {
        run: path.into(),
        passed_over: Vec::new(),
    })
}

/// The newest whole checkpoint of a run's folder, for all ranks of a group; none if the run has none or does not exist.
///
/// # Errors
/// As [`find_together`], and [`CheckpointError::NoneWhole`] if all of its checkpoints are damaged.
pub fn find_any_together(run: &Path, group: &dyn Group) -> Result<Option<WholeCheckpoint>> {
    let listed = match group.rank() {
        0 => list(run, &names::checkpoints(run)),
        _ => Ok(None),
    };
    let names = gather(group, listed)?.swap_remove(0);
    newest(run, names.unwrap_or_default(), group)
}

/// The folder of the checkpoint that [`find`] will probably use, at little cost: checks the sizes of all files, but
/// only the contents of `file`, a small one. [`find`] uses an older one if the contents of others are damaged.
pub fn glance(path: &Path, file: &str) -> Option<PathBuf> {
    let path = run_of(path);
    let checkpoints = names::checkpoints(path);
    let folders = match list(path, &checkpoints).ok()? {
        None => vec![path.to_path_buf()],
        Some(names) => names.iter().map(|name| checkpoints.join(name)).collect(),
    };
    folders
        .into_iter()
        .find(|folder| Checkpoint::seems_whole(folder, file))
}

/// The run's folder, if `path` is its folder of checkpoints; else `path`.
fn run_of(path: &Path) -> &Path {
    match path.file_name() {
        Some(name) if name == "checkpoints" => path.parent().unwrap_or(path),
        _ => path,
    }
}

/// The first whole checkpoint of `names`, which are sorted newest first; none if `names` is empty.
fn newest(run: &Path, names: Vec<String>, group: &dyn Group) -> Result<Option<WholeCheckpoint>> {
    let checkpoints = names::checkpoints(run);
    let mut passed_over = Vec::new();
    for name in names {
        match Checkpoint::open_together(&checkpoints.join(name), group) {
            Ok(checkpoint) => {
                return Ok(Some(WholeCheckpoint {
                    checkpoint,
                    passed_over,
                }));
            }
            Err(error @ (CheckpointError::Newer { .. } | CheckpointError::Group(_))) => {
                return Err(error);
            }
            Err(error) => passed_over.push(error),
        }
    }
    if passed_over.is_empty() {
        return Ok(None);
    }
    Err(CheckpointError::NoneWhole {
        run: run.into(),
        passed_over,
    })
}

/// The names of a run's checkpoints, newest first; none if the folder is not a run's.
fn list(path: &Path, checkpoints: &Path) -> Result<Option<Vec<String>>> {
    // A run that has not saved yet still has metrics.
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
