//! Rotary position embedding (Su et al. 2021).

use super::extent::Extent;
use super::positions::position_arguments;
use super::{Cuda, Driver, arguments, int, kernel};
use crate::Result;
use crate::operation::Rotary;

pub(super) fn rotary<D: Driver>(cuda: &Cuda<D>, op: Rotary) -> Result {
    let kernel = kernel!("rotary", "rotary", op.x.dtype());
    let (rows, heads) = (op.x.dims()[0], op.x.dims()[1] / op.head_dim);
    let (table_rows, half) = (op.table.dims()[1], op.table.dims()[2]);
    let [positions, seq] = position_arguments(op.positions);
    let sign = if op.inverse { -1.0 } else { 1.0 };
    let arguments = arguments! {
        &op.x, op.x.strides()[0], &op.table, table_rows, positions, seq,
        int(heads), int(op.head_dim), int(half), sign,
    };
    // One pack of pairs per thread.
    cuda.launch(kernel, Extent::rows(rows, heads * half), &arguments)
}
