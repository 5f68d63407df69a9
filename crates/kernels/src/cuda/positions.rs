//! Learned positions.

use super::extent::Extent;
use super::{Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{AddPositions, AddPositionsBackward};
use memory::DType;

pub(super) fn add_positions<D: Driver>(
    cuda: &Cuda<D>,
    AddPositions { x, table, seq }: AddPositions,
) -> Result<(), KernelError> {
    let kernel = kernel!("positions", "add_positions", x.dtype());
    let (rows, width) = (x.dims()[0], x.dims()[1]);
    let arguments = [(&x).into(), (&table).into(), seq.into(), width.into()];
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}

pub(super) fn add_positions_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: AddPositionsBackward,
) -> Result<(), KernelError> {
    let AddPositionsBackward {
        dtable,
        dx,
        seq,
        init,
    } = operation;
    let kernel = kernel!(
        "positions",
        "add_positions_backward",
        dtable.dtype(),
        dx.dtype()
    );
    let (positions, width) = (dtable.dims()[0], dtable.dims()[1]);
    let arguments = [
        (&dtable).into(),
        (&dx).into(),
        (dx.dims()[0] / seq).into(),
        seq.into(),
        width.into(),
        accumulates(&init),
    ];
    cuda.launch(kernel, Extent::rows(positions, width), &arguments)
}
