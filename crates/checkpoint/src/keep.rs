//! Which checkpoints stay.

use crate::error::CheckpointError;
use crate::names::{self, Name};
use files::{FileSystem, FilesError, remove_tree};
use std::path::{Path, PathBuf};

/// Removes old checkpoints: of those up to step `newest`, which was just saved, the last `last` stay (at least that one),
/// and that of step `best`. Returns the steps that were removed.
///
/// # Errors
/// [`CheckpointError::Files`]. One that is half removed has a name by which it is never found.
pub fn keep(
    disk: &dyn FileSystem,
    run: &Path,
    newest: u64,
    last: usize,
    best: Option<u64>,
) -> Result<Vec<u64>, CheckpointError> {
    let folder = names::checkpoints(run);
    let mut steps = saved(disk, run)?;
    steps.retain(|&step| step <= newest);
    let old = steps.len().saturating_sub(last.max(1));
    steps.truncate(old);
    steps.retain(|&step| Some(step) != best);
    for &step in &steps {
        names::discard(disk, &folder, Name::Saved(step))?;
    }
    Ok(steps)
}

/// Renames the checkpoints of steps after `step` to `step-N.superseded`, and returns their new paths.
///
/// To be called before a run goes on from `step` in its own folder: those after it are damaged, or of steps that are taken
/// once more, and must not be found when this run is resumed in turn. Nothing but an older `step-N.superseded` is removed.
///
/// # Errors
/// [`CheckpointError::Files`].
pub fn set_aside_after(
    disk: &dyn FileSystem,
    run: &Path,
    step: u64,
) -> Result<Vec<PathBuf>, CheckpointError> {
    let folder = names::checkpoints(run);
    let mut aside = Vec::new();
    for name in names::list(disk, &folder)? {
        let (Name::Saved(later) | Name::Old(later)) = name else {
            continue;
        };
        if later > step {
            let path = folder.join(name.text());
            let to = folder.join(format!("step-{later}.superseded"));
            if disk.list(&to).is_ok() {
                remove_tree(disk, &to).map_err(FilesError::at("remove", &to))?;
            }
            disk.rename(&path, &to)
                .map_err(FilesError::at("rename", &path))?;
            aside.push(to);
        }
    }
    if !aside.is_empty() {
        disk.sync_folder(&folder)
            .map_err(FilesError::at("sync", &folder))?;
    }
    Ok(aside)
}

/// Steps of which a run has a checkpoint, in order.
///
/// # Errors
/// [`CheckpointError::Files`].
pub fn saved(disk: &dyn FileSystem, run: &Path) -> Result<Vec<u64>, CheckpointError> {
    let names = names::list(disk, &names::checkpoints(run))?.into_iter();
    let steps = names.filter_map(|name| match name {
        Name::Saved(step) => Some(step),
        _ => None,
    });
    Ok(steps.collect())
}
