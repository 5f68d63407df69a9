//! Why an operation failed.

/// What operations and devices answer.
pub type Result<T = (), E = KernelError> = std::result::Result<T, E>;

/// An operation failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{operation}: {message}")]
pub struct KernelError {
    /// The operation.
    pub operation: &'static str,
    /// What does not fit, or what failed.
    pub message: String,
    /// The cause of the failure.
    pub fault: Fault,
}

/// The cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It was called with tensors that do not fit: a bug in the caller.
    Caller,
    /// The device, its driver or its library is missing or failed.
    Device,
    /// The device has no memory left besides what is leased.
    DeviceFull,
    /// A file that the step reads or writes failed. No queue has running work any more, and later calls are refused.
    Disk,
    /// Other ranks cannot be reached or do not answer. Later calls are refused.
    Collective,
    /// The operation is too large for the device: a head is too wide, or a block has too little memory.
    TooLarge,
}

impl KernelError {
    /// A misuse by the caller, unless a condition holds.
    pub(crate) fn unless(
        condition: bool,
        operation: &'static str,
        message: impl FnOnce() -> String,
    ) -> Result {
        if condition {
            return Ok(());
        }
        Err(KernelError::misfit(operation, message()))
    }

    /// A misuse by the caller.
    pub fn misfit(operation: &'static str, message: impl Into<String>) -> KernelError {
        KernelError {
            operation,
            message: message.into(),
            fault: Fault::Caller,
        }
    }

    /// A failure of the device.
    pub fn device(operation: &'static str, message: impl Into<String>) -> KernelError {
        KernelError {
            operation,
            message: message.into(),
            fault: Fault::Device,
        }
    }

    /// A failure of a disk.
    pub fn disk(operation: &'static str, message: impl Into<String>) -> KernelError {
        KernelError {
            fault: Fault::Disk,
            ..KernelError::device(operation, message)
        }
    }

    /// A limit of the device.
    pub fn too_large(operation: &'static str, message: impl Into<String>) -> KernelError {
        KernelError {
            fault: Fault::TooLarge,
            ..KernelError::device(operation, message)
        }
    }
}
