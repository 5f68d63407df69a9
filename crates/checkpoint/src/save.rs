//! Writes a checkpoint to the disk.

use crate::Result;
use crate::manifest::{MANIFEST_FILE, Manifest};
use crate::names::{self, Name};
use crate::state::{STATE_FILE, TrainerState};
use files::{FileSystem, FilesError, TensorSource, WrittenFile, write_file, write_tensors};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The contents of a checkpoint.
pub struct Contents<'a> {
    /// The state of the run.
    pub state: &'a TrainerState,
    /// The weights, under Hugging Face names.
    pub model: &'a dyn TensorSource,
    /// The name of the weights' files, without their ending: `model` for a whole model, `adapter_model` for adapters alone.
    pub stem: &'a str,
    /// The optimizer states, named by the parameter's name, a dot, and the state's name.
    pub optimizer: &'a dyn TensorSource,
    /// Small files that go with it, by name: `config.json`, the run's settings, the tokenizer's.
    pub files: &'a [(String, Vec<u8>)],
    /// The most bytes of a tensor file; larger ones become shards.
    pub max_shard_bytes: u64,
}

/// Writes `RUN/checkpoints/step-N`, makes it durable, and returns its path. After a power failure at any moment, all
/// other checkpoints are whole. Of this step, the previous checkpoint, if there was one, or the new one is whole.
///
/// `run` must exist. What earlier saves left half done is removed first.
///
/// # Errors
/// [`CheckpointError::Files`](crate::CheckpointError::Files). What was half written is then removed, as far as the disk allows.
pub fn save(disk: &dyn FileSystem, run: &Path, contents: &Contents) -> Result<PathBuf> {
    let folder = names::checkpoints(run);
    make_folder(disk, run, &folder)?;
    tidy(disk, &folder)?;
    let step = contents.state.step;
    let temporary = folder.join(Name::Temporary(step).text());
    let written = write(disk, &temporary, contents).and_then(|()| name_staged(disk, &folder, step));
    if written.is_err() {
        // The failure of the save is reported; the next save tries to remove this again.
        let _ = files::remove_tree(disk, &temporary);
    }
    Ok(written?)
}

/// Makes `RUN/checkpoints` if it does not exist, and makes its name and the run's durable.
pub(crate) fn make_folder(
    disk: &dyn FileSystem,
    run: &Path,
    folder: &Path,
) -> Result<(), FilesError> {
    match disk.create_folder(folder) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
        made => made.map_err(FilesError::at("make", folder))?,
    }
    let around = run.parent().filter(|parent| !parent.as_os_str().is_empty());
    for folder in [run, around.unwrap_or(Path::new("."))] {
        disk.sync_folder(folder)
            .map_err(FilesError::at("sync", folder))?;
    }
    Ok(())
}

/// Removes what saves and removals left half done. A checkpoint that was about to be replaced gets its name back,
/// unless its replacement exists.
pub(crate) fn tidy(disk: &dyn FileSystem, folder: &Path) -> Result<(), FilesError> {
    let found = names::list(disk, folder)?;
    for &name in &found {
        match name {
            Name::Saved(_) => {}
            Name::Old(step) if !found.contains(&Name::Saved(step)) => {
                let old = folder.join(name.text());
                disk.rename(&old, &folder.join(Name::Saved(step).text()))
                    .map_err(FilesError::at("rename", &old))?;
            }
            name => names::discard(disk, folder, name)?,
        }
    }
    Ok(())
}

/// Writes all files of a checkpoint and makes them durable, the manifest last.
fn write(disk: &dyn FileSystem, folder: &Path, contents: &Contents) -> Result<(), FilesError> {
    disk.create_folder(folder)
        .map_err(FilesError::at("make", folder))?;
    let tensors =
        |stem, source| write_tensors(disk, folder, stem, source, contents.max_shard_bytes);
    let mut written = tensors(contents.stem, contents.model)?;
    written.extend(tensors("optimizer", contents.optimizer)?);
    finish(disk, folder, written, contents.files, contents.state)
}

/// Writes the small files of a checkpoint whose tensors are already durable, and makes all of it durable.
pub(crate) fn finish(
    disk: &dyn FileSystem,
    folder: &Path,
    mut written: Vec<WrittenFile>,
    files: &[(String, Vec<u8>)],
    state: &TrainerState,
) -> Result<(), FilesError> {
    for (name, bytes) in files {
        written.push(write_file(disk, folder, name, bytes)?);
    }
    let text = serde_json::to_string_pretty(state).expect("a state is JSON");
    written.push(write_file(
        disk,
        folder,
        STATE_FILE,
        format!("{text}\n").as_bytes(),
    )?);
    let manifest = Manifest::new(state, &written).text();
    write_file(disk, folder, MANIFEST_FILE, manifest.as_bytes())?;
    disk.sync_folder(folder)
        .map_err(FilesError::at("sync", folder))
}

/// Gives a written checkpoint its name, and removes an older one with that name.
pub(crate) fn name_staged(
    disk: &dyn FileSystem,
    folder: &Path,
    step: u64,
) -> Result<PathBuf, FilesError> {
    let [temporary, saved, old] = [Name::Temporary(step), Name::Saved(step), Name::Old(step)]
        .map(|name| folder.join(name.text()));
    let rename = |from: &Path, to: &Path| {
        disk.rename(from, to)
            .map_err(FilesError::at("rename", from))
    };
    let replaces = names::list(disk, folder)?.contains(&Name::Saved(step));
    if replaces {
        rename(&saved, &old)?;
    }
    if let Err(error) = rename(&temporary, &saved) {
        if replaces {
            // The failure above is reported; `find` also knows the old name.
            let _ = disk.rename(&old, &saved);
        }
        return Err(error);
    }
    disk.sync_folder(folder)
        .map_err(FilesError::at("sync", folder))?;
    if replaces {
        names::discard(disk, folder, Name::Old(step))?;
    }
    Ok(saved)
}
