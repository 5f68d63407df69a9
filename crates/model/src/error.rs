//! The error of passes.

use kernels::KernelError;
use memory::OutOfMemory;
use units::UnitError;

/// A result with a [`ModelError`], unless another error is named.
pub type Result<T = (), E = ModelError> = std::result::Result<T, E>;

/// Why a pass failed.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A lease was refused.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// An operation was called wrongly, or the device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// [`crate::Training::is_stopped`] asked to break the pass off.
    #[error("the pass was broken off")]
    Stopped,
}

impl From<UnitError> for ModelError {
    fn from(error: UnitError) -> ModelError {
        match error {
            UnitError::OutOfMemory(refused) => refused.into(),
            UnitError::Kernel(error) => error.into(),
        }
    }
}
