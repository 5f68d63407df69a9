//! A checkpoint that several ranks write at once, each the elements that it has.
//!
//! The first rank makes the folder ([`stage`]), then every rank writes its file into it ([`write_part`]); when all of them are
//! durable, the first one writes what belongs to them all, and gives the folder its name ([`publish`]). Where a rank fails,
//! nothing is published ([`discard_staged`]). [`save_together`] is all of it; a run that saves beside its steps takes it apart.

use crate::agree::{agree, gather};
use crate::error::CheckpointError;
use crate::names::{self, Name};
use crate::save::{finish, make_folder, name_staged, tidy};
use crate::state::TrainerState;
use collectives::Group;
use files::{
    FileSystem, FilesError, PIECE_INDEX, PieceIndex, PieceSource, WrittenPieces, write_file,
    write_pieces,
};
use std::path::PathBuf;

/// Where a checkpoint of several ranks is being saved.
#[derive(Clone, Debug)]
pub struct Staging {
    /// The run's folder.
    pub run: PathBuf,
    /// The step.
    pub step: u64,
}

impl Staging {
    fn folder(&self) -> PathBuf {
        names::checkpoints(&self.run).join(Name::Temporary(self.step).text())
    }

    /// Where it is once it is published.
    pub fn saved(&self) -> PathBuf {
        names::checkpoints(&self.run).join(Name::Saved(self.step).text())
    }
}

/// Makes the folder that ranks write into, and removes what earlier saves left half done: on one rank, before any writes.
///
/// # Errors
/// [`CheckpointError::Files`].
pub fn stage(disk: &dyn FileSystem, staging: &Staging) -> Result<(), CheckpointError> {
    let checkpoints = names::checkpoints(&staging.run);
    make_folder(disk, &staging.run, &checkpoints)?;
    tidy(disk, &checkpoints)?;
    let folder = staging.folder();
    let made = disk.create_folder(&folder);
    Ok(made.map_err(FilesError::at("make", &folder))?)
}

/// Writes what a rank has, and makes it durable.
///
/// # Errors
/// [`CheckpointError::Files`].
pub fn write_part(
    disk: &dyn FileSystem,
    staging: &Staging,
    (rank, size): (usize, usize),
    source: &dyn PieceSource,
) -> Result<WrittenPieces, CheckpointError> {
    let (folder, stem) = (staging.folder(), format!("rank-{rank:05}-of-{size:05}"));
    let written = write_pieces(disk, &folder, &stem, source)?;
    let synced = disk.sync_folder(&folder);
    synced.map_err(FilesError::at("sync", &folder))?;
    Ok(written)
}

/// Writes what belongs to the parts of all ranks, which are durable, and gives the checkpoint its name: on one rank.
/// `files` are as in [`crate::Contents`].
///
/// # Errors
/// [`CheckpointError::Files`]; then nothing is left of it, as far as the disk allows.
pub fn publish(
    disk: &dyn FileSystem,
    staging: &Staging,
    state: &TrainerState,
    files: &[(String, Vec<u8>)],
    parts: &[WrittenPieces],
) -> Result<PathBuf, CheckpointError> {
    let folder = staging.folder();
    let publish = || {
        let index = PieceIndex::of(&folder, parts)?;
        let mut written: Vec<_> = parts.iter().map(|part| part.file.clone()).collect();
        written.push(write_file(
            disk,
            &folder,
            PIECE_INDEX,
            index.text().as_bytes(),
        )?);
        finish(disk, &folder, written, files, state)?;
        name_staged(disk, &names::checkpoints(&staging.run), staging.step)
    };
    publish().map_err(|error: FilesError| {
        discard_staged(disk, staging);
        error.into()
    })
}

/// Removes what ranks have written where one of them failed: on one rank, when none writes any more.
pub fn discard_staged(disk: &dyn FileSystem, staging: &Staging) {
    // The failure to save is the one to tell; the next save tries to remove this again.
    let _ = files::remove_tree(disk, &staging.folder());
}

/// Saves a checkpoint on all ranks of a group, and returns its path; otherwise as [`crate::save`].
///
/// # Errors
/// On all ranks, as [`gather`]: nothing is published then.
pub fn save_together(
    disk: &dyn FileSystem,
    staging: &Staging,
    group: &dyn Group,
    (state, files): (&TrainerState, &[(String, Vec<u8>)]),
    source: &dyn PieceSource,
) -> Result<PathBuf, CheckpointError> {
    let (rank, size) = (group.rank(), group.size());
    let leads = rank == 0;
    let if_leads = |act: &dyn Fn() -> Result<(), CheckpointError>| match leads {
        true => act(),
        false => Ok(()),
    };
    agree(group, if_leads(&|| stage(disk, staging)))?;
    let own = write_part(disk, staging, (rank, size), source);
    let parts = gather(group, own).inspect_err(|_| {
        if leads {
            discard_staged(disk, staging);
        }
    })?;
    agree(
        group,
        if_leads(&|| publish(disk, staging, state, files, &parts).map(drop)),
    )?;
    Ok(staging.saved())
}
