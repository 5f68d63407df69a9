//! Errors of scratch files.

use std::io;
use std::path::PathBuf;

/// Why scratch files cannot be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum ScratchError {
    /// The folder cannot be made or used.
    #[error("cannot use `{}` for scratch files: {error}", path.display())]
    Folder { path: PathBuf, error: io::Error },
    /// Another run has the folder.
    #[error(
        "another run{holder} keeps its states in `{}`; wait until it is done, or name another folder", folder.display()
    )]
    Held { folder: PathBuf, holder: String },
    /// The disk has too little room.
    #[error(
        "`{}` needs {needed} bytes and its disk has {free} free; name a folder on a larger disk", path.display()
    )]
    Full {
        path: PathBuf,
        needed: u64,
        free: u64,
    },
    /// A file cannot be made.
    #[error("cannot make the scratch file `{}`: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
}
