//! Sums of rows, one row after the other.

use super::extent::Extent;
use super::{Cuda, Driver, accumulates, arguments, kernel};
use crate::Result;
use crate::operation::SumInOrder;

pub(super) fn sum_in_order<D: Driver>(cuda: &Cuda<D>, op: SumInOrder) -> Result {
    let kernel = kernel!("sum_in_order", "sum_in_order", op.out.dtype());
    let (rows, width) = (op.x.dims()[0], op.out.elements());
    let arguments = arguments![&op.out, &op.x, rows, width, accumulates(&op.init)];
    cuda.launch(kernel, Extent::flat(width), &arguments)
}
