//! Why an operation was not carried out.

/// An operation was not carried out.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{operation}: {message}")]
pub struct KernelError {
    /// The operation.
    pub operation: &'static str,
    /// What does not fit, or what failed.
    pub message: String,
    /// Who has to change.
    pub fault: Fault,
}

/// Why an operation was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It was called with tensors that do not fit: a defect of the caller.
    Caller,
    /// The device, its driver or its library is missing or failed.
    Device,
    /// The device has no memory left beside what is leased.
    DeviceFull,
    /// A file that the step reads and writes failed. Nothing is under way in any queue any more, and what is asked for
    /// later is refused.
    Disk,
    /// Other ranks cannot be reached, or do not answer. What is asked for later is refused.
    Collective,
    /// The operation is larger than the device can do it: a head too wide, too little memory for a block.
    TooLarge,
}

impl KernelError {
    /// A defect of the caller, unless a condition holds.
    pub(crate) fn unless(
        condition: bool,
        operation: &'static str,
        message: impl FnOnce() -> String,
    ) -> Result<(), KernelError> {
        if condition {
            return Ok(());
        }
        Err(KernelError::misfit(operation, message()))
    }

    /// A defect of the caller.
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
