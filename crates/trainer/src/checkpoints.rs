//! Finds the checkpoint that a command works on.

use crate::failure::Result;
use crate::initial_model::refuse_what_is_no_folder;
use checkpoint::{Checkpoint, WholeCheckpoint, find_any_together, find_together, glance};
use collectives::{Alone, Group};
use model::ADAPTER_CONFIG;
use settings::Resume;
use std::path::{Path, PathBuf};

/// The checkpoint in a folder, or the newest whole one of a run.
pub(crate) fn newest_checkpoint(folder: &Path) -> Result<Checkpoint> {
    newest_together(folder, &Alone)
}

/// The same, agreed on by all ranks of a group. The first rank warns of broken checkpoints.
pub(crate) fn newest_together(folder: &Path, group: &dyn Group) -> Result<Checkpoint> {
    Ok(tell_passed_over(find_together(folder, group)?, group))
}

/// The newest whole checkpoint of a run, agreed on by all ranks of a group; none if it has none.
pub(crate) fn newest_if_any(run: &Path, group: &dyn Group) -> Result<Option<Checkpoint>> {
    let found = find_any_together(run, group)?;
    Ok(found.map(|found| tell_passed_over(found, group)))
}

fn tell_passed_over(found: WholeCheckpoint, group: &dyn Group) -> Checkpoint {
    let WholeCheckpoint {
        checkpoint,
        passed_over,
    } = found;
    if group.rank() == 0 {
        for newer in passed_over {
            tracing::warn!("{newer}; an earlier one is taken");
        }
    }
    checkpoint
}

/// The folder of the newest checkpoint, or the folder itself if it has a model.
pub(crate) fn model_folder(folder: &Path) -> Result<PathBuf> {
    refuse_what_is_no_folder(folder)?;
    let has = |name| folder.join(name).exists();
    match (has("config.json") || has(ADAPTER_CONFIG)) && !has("manifest.json") {
        true => Ok(folder.into()),
        false => Ok(newest_checkpoint(folder)?.path),
    }
}

/// The configuration file of the checkpoint to resume, for settings that the command line leaves open. Of a run, its
/// newest checkpoint's.
pub(crate) fn configuration_to_resume(resume: &Resume, out: Option<&Path>) -> Option<PathBuf> {
    let folder = match resume {
        Resume::Folder(folder) => folder,
        Resume::Latest | Resume::Auto => out?,
    };
    Some(glance(folder, "config.toml")?.join("config.toml"))
}
