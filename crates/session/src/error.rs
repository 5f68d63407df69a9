//! Errors of sessions.

use files::FilesError;
use kernels::KernelError;
use memory::OutOfMemory;
use model::{ModelError, WeightsError};
use optim::RestoreError;
use scratch::ScratchError;
use settings::ConfigError;
use std::path::PathBuf;
use units::UnitError;

/// A result with a [`SessionError`], unless another error is named.
pub type Result<T = (), E = SessionError> = std::result::Result<T, E>;

/// A session could not be made, or a step failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum SessionError {
    /// No session can be made from the settings.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A lease was refused.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// An operation failed, or was called wrongly.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A step was interrupted, as [`crate::Session::stop_when`] asked.
    #[error("the step was broken off")]
    Stopped,
    /// A disk has no room for optimizer states.
    #[error(transparent)]
    Scratch(#[from] ScratchError),
    /// A step that updates in its backward pass failed after the first update.
    #[error(
        "a step failed after it had updated some of the weights (optim.release = backward): what is left is no state of the \
         run; go on from the last checkpoint"
    )]
    HalfUpdated,
    /// The gradient of a matrix was asked for, but gradients are released.
    #[error(
        "the gradients of matrices are gone when a step is over (optim.release = backward); --set optim.release=step keeps \
         them"
    )]
    Released,
    /// The gradient of a frozen parameter was asked for.
    #[error("`{0}` is frozen (train.freeze), so it has no gradient")]
    Frozen(String),
    /// A session was to sleep whose optimizer states are in a file, which goes with the session.
    #[error(
        "optimizer states are in a scratch file, which goes when the device's memory is given back (offload.optimizer): keep them in \
         memory with offload.optimizer=pinned"
    )]
    StatesOnDisk,
    /// Invalid weights.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Invalid optimizer states in a file.
    #[error(transparent)]
    OptimizerState(#[from] OptimizerStateError),
    /// Logits that are not finite, so that no token can be drawn.
    #[error(
        "after {after} tokens the model's logits are not finite: its weights are not sound, or too large for its data type; \
         take an earlier checkpoint, or compute in --dtype f32"
    )]
    NotFinite { after: usize },
    /// A file could not be written.
    #[error("cannot write {path}: {source}")]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
}

/// An optimizer's states could not be written or read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum OptimizerStateError {
    /// The files are missing or torn.
    #[error("the optimizer's states cannot be read: {0}")]
    Files(#[from] FilesError),
    /// A state is missing or does not fit.
    #[error("{path}: {source}")]
    Restore { path: PathBuf, source: RestoreError },
}

impl From<UnitError> for SessionError {
    fn from(error: UnitError) -> SessionError {
        match error {
            UnitError::OutOfMemory(refused) => refused.into(),
            UnitError::Kernel(error) => error.into(),
        }
    }
}

impl From<ModelError> for SessionError {
    fn from(error: ModelError) -> SessionError {
        match error {
            ModelError::OutOfMemory(error) => error.into(),
            ModelError::Kernel(error) => error.into(),
            ModelError::Stopped => SessionError::Stopped,
        }
    }
}
