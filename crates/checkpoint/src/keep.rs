//! Decides which checkpoints are kept.

use crate::Result;
use crate::names::{self, Name};
use files::{FileSystem, FilesError, remove_tree};
use std::path::{Path, PathBuf};

/// Removes old checkpoints. Of those up to step `newest`, which was just saved, the last `last` are kept (at least
/// one), and that of step `best`. Returns the removed steps.
///
/// # Errors
/// [`CheckpointError::Files`](crate::CheckpointError::Files). A half removed checkpoint has a name that is never found.
pub fn keep(
    disk: &dyn FileSystem,
    run: &Path,
    newest: u64,
    last: usize,
    best: Option<u64>,
) -> Result<Vec<u64>> {
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
/// Called before a run is resumed at `step` in its own folder. Later checkpoints are damaged, or their steps are made
/// again, so the next resume must not find them. Only an older `step-N.superseded` is removed.
///
/// # Errors
/// [`CheckpointError::Files`](crate::CheckpointError::Files).
pub fn set_aside_after(disk: &dyn FileSystem, run: &Path, step: u64) -> Result<Vec<PathBuf>> {
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

/// The steps of a run's checkpoints, in order.
///
/// # Errors
/// [`CheckpointError::Files`](crate::CheckpointError::Files).
pub fn saved(disk: &dyn FileSystem, run: &Path) -> Result<Vec<u64>> {
    let names = names::list(disk, &names::checkpoints(run))?.into_iter();
    let steps = names.filter_map(|name| match name {
        Name::Saved(step) => Some(step),
        _ => None,
    });
    Ok(steps.collect())
}
