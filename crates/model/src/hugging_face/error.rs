//! Why weights were not read or written.

use files::FilesError;
use std::path::PathBuf;

/// Weights could not be read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum WeightsError {
    /// A file is missing, cannot be read, or is damaged.
    #[error(transparent)]
    Read(FilesError),
    /// A tensor that the model needs is missing or has another shape, or the model has no tensor of this name.
    #[error("{path}: tensor `{name}` {problem}")]
    Tensor {
        path: PathBuf,
        name: String,
        problem: String,
    },
    /// A block in MXFP4 has a power of two with which bf16 does not hold its values.
    #[error(
        "tensor `{name}` has the exponent {exponent}, with which values of its block overflow bf16, and 252 is the largest with which \
         none does; the file is damaged: fetch it again"
    )]
    Beyond { name: String, exponent: u8 },
    /// A file could not be written.
    #[error(transparent)]
    Write(FilesError),
}

impl From<FilesError> for WeightsError {
    fn from(error: FilesError) -> WeightsError {
        WeightsError::Read(error)
    }
}
