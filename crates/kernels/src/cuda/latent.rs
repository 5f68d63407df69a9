//! TODO

use super::{Cuda, Driver};
use crate::KernelError;
use crate::operation::{ExpandKeys, ExpandKeysBackward, RotaryTail};

pub(super) fn rotary_tail<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: RotaryTail,
) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn expand_keys<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: ExpandKeys,
) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn expand_keys_backward<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: ExpandKeysBackward,
) -> Result<(), KernelError> {
    todo!()
}
