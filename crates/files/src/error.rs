//! Errors of files.

use crate::file_system::is_full;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Why a file cannot be read, written or trusted.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum FilesError {
    /// The system refused.
    #[error("cannot {doing} `{}`: {error}", path.display())]
    File {
        doing: &'static str,
        path: PathBuf,
        error: io::Error,
    },
    /// A file is no safetensors file, or a damaged one.
    #[error("`{}` is not a whole safetensors file: {reason}", path.display())]
    NotSafetensors { path: PathBuf, reason: String },
    /// A folder has no tensors under the wanted name.
    #[error("`{}` has neither `{stem}.safetensors` nor `{stem}.safetensors.index.json`", folder.display())]
    NoTensors { folder: PathBuf, stem: String },
    /// An index of shards does not fit its files.
    #[error("`{}` does not fit its files: {reason}", path.display())]
    Index { path: PathBuf, reason: String },
    /// The system has no memory left for a chunk of a tensor, or a header.
    #[error("the system refuses {bytes} bytes of host memory")]
    Memory { bytes: usize },
    /// A source of tensors wrote another number of bytes than it announced.
    #[error("`{name}` has {expected} bytes, but its source wrote {written}")]
    Source {
        name: String,
        expected: u64,
        written: u64,
    },
}

impl FilesError {
    /// Adds the operation and the path to an error of the system, for `map_err`.
    pub fn at(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FilesError {
        move |error| FilesError::File {
            doing,
            path: path.into(),
            error,
        }
    }

    /// Whether the only cause is a lack of host memory.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            FilesError::Memory { .. } => true,
            FilesError::File { error, .. } => error.kind() == ErrorKind::OutOfMemory,
            _ => false,
        }
    }

    /// Whether a file could not be written because the disk has no room for it.
    pub fn is_full(&self) -> bool {
        matches!(self, FilesError::File { error, .. } if is_full(error))
    }
}

impl From<FilesError> for io::Error {
    fn from(error: FilesError) -> io::Error {
        let kind = match &error {
            FilesError::Memory { .. } => ErrorKind::OutOfMemory,
            FilesError::File { error, .. } => error.kind(),
            _ => ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}
