//! Sums of rows, one row after the other.

use super::extent::Extent;
use super::{Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::KernelError;
use crate::operation::SumInOrder;
use memory::DType;

pub(super) fn sum_in_order<D: Driver>(
    cuda: &Cuda<D>,
    SumInOrder { out, x, init }: SumInOrder,
) -> Result<(), KernelError> {
    let kernel = kernel!("sum_in_order", "sum_in_order", out.dtype());
    let (rows, width) = (x.dims()[0], out.elements());
    let arguments = [
        (&out).into(),
        (&x).into(),
        rows.into(),
        width.into(),
        accumulates(&init),
    ];
    cuda.launch(kernel, Extent::flat(width), &arguments)
}
