//! Rotary position embedding (Su et al. 2021).

use super::extent::Extent;
use super::positions::position_arguments;
use super::{Argument, Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::Rotary;
use memory::DType;

pub(super) fn rotary<D: Driver>(cuda: &Cuda<D>, operation: Rotary) -> Result<(), KernelError> {
    let Rotary {
        x,
        table,
        positions,
        inverse,
    } = operation;
    let kernel = kernel!("rotary", "rotary", x.dtype());
    let (rows, width) = (x.dims()[0], x.dims()[1]);
    let (table_rows, half) = (table.dims()[1], table.dims()[2]);
    let [positions, seq] = position_arguments(positions);
    let sign = if inverse { -1.0 } else { 1.0 };
    let arguments = [
        (&x).into(),
        x.strides()[0].into(),
        (&table).into(),
        table_rows.into(),
        positions,
        seq,
        Argument::Int((width / (2 * half)) as i32),
        Argument::Int(half as i32),
        sign.into(),
    ];
    // One pack of pairs per thread.
    cuda.launch(kernel, Extent::rows(rows, width / 2), &arguments)
}
