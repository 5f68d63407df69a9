//! Why there is no place for scratch files.

use std::io;
use std::path::PathBuf;

/// There is no place for scratch files.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// The folder cannot be made or used.
    #[error("cannot use `{}` for scratch files: {error}", path.display())]
    Folder {
        /// The folder, or what in it.
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
        /// Its process, if it left its number.
        holder: String,
    },
    /// The disk has too little room.
    #[error(
        "`{}` needs {needed} bytes and its disk has {free} free; name a folder on a larger disk", path.display()
    )]
    Full {
        /// The file.
        path: PathBuf,
        /// What it needs.
        needed: u64,
        /// What is free.
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
