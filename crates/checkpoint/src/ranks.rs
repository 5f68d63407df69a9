//! The disk operations of ranks for a joint checkpoint. `joint.rs` has their order.

use crate::Result;
use crate::names::{self, Name};
use crate::save::{finish, make_folder, name_staged, tidy};
use crate::state::TrainerState;
use files::{
    FileSystem, FilesError, PIECE_INDEX, PieceIndex, PieceSource, WrittenPieces, write_file,
    write_pieces,
};
use std::path::PathBuf;

/// A checkpoint that several ranks write together, without their pieces.
pub struct JointCheckpoint {
    /// The run's folder.
    pub run: PathBuf,
    /// The state of the run.
    pub state: TrainerState,
    /// Further files, as in [`crate::Contents`].
    pub files: Vec<(String, Vec<u8>)>,
    /// The first rank calls this once the checkpoint has its final name.
    pub published: Box<dyn FnOnce() + Send>,
}

/// The place of a joint checkpoint that is being saved.
#[derive(Clone, Debug)]
pub(crate) struct StagedCheckpoint {
    /// The run's folder.
    pub(crate) run: PathBuf,
    /// The step.
    pub(crate) step: u64,
}

impl StagedCheckpoint {
    fn folder(&self) -> PathBuf {
        names::checkpoints(&self.run).join(Name::Temporary(self.step).text())
    }

    /// Its path after it is published.
    pub(crate) fn saved(&self) -> PathBuf {
        names::checkpoints(&self.run).join(Name::Saved(self.step).text())
    }
}

/// Makes the folder for ranks' parts, and removes what earlier saves left half done: on one rank, before any writes.
pub(crate) fn stage(disk: &dyn FileSystem, staging: &StagedCheckpoint) -> Result {
    let checkpoints = names::checkpoints(&staging.run);
    make_folder(disk, &staging.run, &checkpoints)?;
    tidy(disk, &checkpoints)?;
    let folder = staging.folder();
    let made = disk.create_folder(&folder);
    Ok(made.map_err(FilesError::at("make", &folder))?)
}

/// Writes a rank's pieces, and makes them durable.
pub(crate) fn write_part(
    disk: &dyn FileSystem,
    staging: &StagedCheckpoint,
    (rank, size): (usize, usize),
    source: &dyn PieceSource,
) -> Result<WrittenPieces> {
    let (folder, stem) = (staging.folder(), format!("rank-{rank:05}-of-{size:05}"));
    let written = write_pieces(disk, &folder, &stem, source)?;
    let synced = disk.sync_folder(&folder);
    synced.map_err(FilesError::at("sync", &folder))?;
    Ok(written)
}

/// Writes the common files after all ranks' parts are durable, and gives the checkpoint its name: on one rank.
///
/// # Errors
/// [`CheckpointError::Files`]. Then nothing is left of the checkpoint, as far as the disk allows.
pub(crate) fn publish(
    disk: &dyn FileSystem,
    staging: &StagedCheckpoint,
    checkpoint: &JointCheckpoint,
    parts: &[WrittenPieces],
) -> Result {
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
        finish(disk, &folder, written, &checkpoint.files, &checkpoint.state)?;
        name_staged(disk, &names::checkpoints(&staging.run), staging.step).map(drop)
    };
    publish().map_err(|error: FilesError| {
        discard_staged(disk, staging);
        error.into()
    })
}

/// Removes the ranks' parts after one of them failed. Called on one rank, when no rank writes any more.
pub(crate) fn discard_staged(disk: &dyn FileSystem, staging: &StagedCheckpoint) {
    // The failure of the save is reported; the next save tries to remove this again.
    let _ = files::remove_tree(disk, &staging.folder());
}
