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
    /// The device, its driver or its library is missing, failed, or cannot do what was asked.
    Device,
}

impl KernelError {
    /// A defect of the caller.
    pub fn misfit(operation: &'static str, message: impl Into<String>) -> KernelError {
        KernelError {
            operation,
            message: message.into(),
            fault: Fault::Caller,
        }
    }

    /// A failure or a limit of the device.
    pub fn device(operation: &'static str, message: impl Into<String>) -> KernelError {
        KernelError {
            operation,
            message: message.into(),
            fault: Fault::Device,
        }
    }
}
