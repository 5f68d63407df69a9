//! Errors while sources are compiled.

use std::fmt;
use std::path::PathBuf;

/// Why there is no machine code.
#[derive(Debug)]
pub enum Error {
    /// There is no compiler in the toolkit's folder, or it is too old.
    NoToolkit(String),
    /// A library of the toolkit cannot be loaded.
    Library(libloading::Error),
    /// A file cannot be read or written.
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// The compiler refuses a source.
    Source {
        /// The source's file.
        path: PathBuf,
        /// The architecture for which it does not compile.
        target: String,
        /// What the compiler says.
        said: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoToolkit(what) => write!(
                f,
                "{what}; eval \"$(scripts/cuda-toolkit)\" installs NVIDIA's NVRTC, without a GPU"
            ),
            Error::Library(error) => write!(f, "the toolkit's library cannot be used: {error}"),
            Error::File { path, error } => write!(f, "{}: {error}", path.display()),
            Error::Source { path, target, said } => {
                write!(
                    f,
                    "{} does not compile for {target}:\n{said}",
                    path.display()
                )
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<libloading::Error> for Error {
    fn from(error: libloading::Error) -> Error {
        Error::Library(error)
    }
}
