//! The error of passes.

use kernels::KernelError;
use memory::OutOfMemory;
use units::UnitError;

/// Why a pass could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A lease was refused.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// An operation was called wrongly, or the device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// It was broken off, as [`crate::PassHooks::is_stopped`] asked.
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
