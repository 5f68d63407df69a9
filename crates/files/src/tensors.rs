//! The tensors of a folder, however its files divide them.

use crate::parts::TensorParts;
use crate::pieces::PieceFiles;
use crate::{FilesError, TensorFiles};
use std::path::Path;

/// Tensors by name.
#[derive(Debug)]
pub enum Tensors {
    /// Each in one file.
    Whole(TensorFiles),
    /// Each in pieces, in as many files as there were writers.
    InPieces(PieceFiles),
}

impl Tensors {
    /// Opens the pieces that a folder has for a stem, else its files as [`TensorFiles::open_folder`] does.
    ///
    /// # Errors
    /// As [`PieceFiles::open_folder`] and [`TensorFiles::open_folder`].
    pub fn open_folder(folder: &Path, stem: &str) -> Result<Tensors, FilesError> {
        match PieceFiles::open_folder(folder, stem)? {
            Some(pieces) => Ok(Tensors::InPieces(pieces)),
            None => Ok(Tensors::Whole(TensorFiles::open_folder(folder, stem)?)),
        }
    }

    /// A tensor by name.
    pub fn get(&self, name: &str) -> Option<TensorParts<'_>> {
        match self {
            Tensors::InPieces(files) => files.get(name),
            Tensors::Whole(files) => files.get(name),
        }
    }

    /// The names of all tensors.
    pub fn names(&self) -> Vec<&str> {
        match self {
            Tensors::InPieces(files) => files.names().collect(),
            Tensors::Whole(files) => files.iter().map(|(name, _)| name).collect(),
        }
    }
}
