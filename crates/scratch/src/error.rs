//! Errors of scratch files.

use std::io;
use std::path::PathBuf;

/// Why scratch files cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// The folder cannot be made or used.
    #[error("cannot use `{}` for scratch files: {error}", path.display())]
    Folder {
        /// The folder, or the file in it.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Another run has the folder.
    #[error(
        "another run{holder} keeps its states in `{}`; wait until it is done, or name another folder", folder.display()
    )]
    Held {
        /// The folder.
        folder: PathBuf,
        /// The run's process, if it wrote down its number.
        holder: String,
    },
    /// The disk has too little room.
    #[error(
        "`{}` needs {needed} bytes and its disk has {free} free; name a folder on a larger disk", path.display()
    )]
    Full {
        /// The file.
        path: PathBuf,
        /// The bytes that it needs.
        needed: u64,
        /// The bytes that are free.
        free: u64,
    },
    /// A file cannot be made.
    #[error("cannot make the scratch file `{}`: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}
