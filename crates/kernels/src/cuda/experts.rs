//! TODO

use super::{Cuda, Driver};
use crate::KernelError;
use crate::operation::{
    GatherRows, GroupedGradient, GroupedMatmul, SumRows, WeighedSwiglu, WeighedSwigluBackward,
};

pub(super) fn gather_rows<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: GatherRows,
) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn sum_rows<D: Driver>(_cuda: &Cuda<D>, _operation: SumRows) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn grouped_matmul<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: GroupedMatmul,
) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn grouped_gradient<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: GroupedGradient,
) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn weighed_swiglu<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: WeighedSwiglu,
) -> Result<(), KernelError> {
    todo!()
}

pub(super) fn weighed_swiglu_backward<D: Driver>(
    _cuda: &Cuda<D>,
    _operation: WeighedSwigluBackward,
) -> Result<(), KernelError> {
    todo!()
}
