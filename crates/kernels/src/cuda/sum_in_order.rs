//! Sums of rows, one row after the other.

use super::extent::Extent;
use super::{Cuda, Driver, accumulates, arguments, kernel};
use crate::Result;
use crate::operation::SumInOrder;

pub(super) fn sum_in_order<D: Driver>(
    cuda: &Cuda<D>,
    SumInOrder { out, x, init }: SumInOrder,
) -> Result {
    let kernel = kernel!("sum_in_order", "sum_in_order", out.dtype());
    let (rows, width) = (x.dims()[0], out.elements());
    let arguments = arguments![&out, &x, rows, width, accumulates(&init)];
    cuda.launch(kernel, Extent::flat(width), &arguments)
}
