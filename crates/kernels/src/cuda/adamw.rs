//! AdamW on ranges, in every form of its states.

use super::{Cuda, Driver};
use crate::{AdamW, KernelError, check};

pub(super) fn adamw<D: Driver>(_cuda: &Cuda<D>, update: AdamW) -> Result<(), KernelError> {
    check::adamw(&update)?;
    Err(KernelError {
        operation: "adamw",
        message: "not written for CUDA yet".into(),
    })
}
