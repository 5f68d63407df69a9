//! Learned positions.

use super::embedding::embedding_backward;
use super::extent::Extent;
use super::{Argument, Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{AddPositions, AddPositionsBackward, EmbeddingBackward, Positions};
use memory::DType;

/// The given positions, or a null pointer and the length of sequences.
pub(super) fn position_arguments(positions: Positions) -> [Argument; 2] {
    match positions {
        Positions::Sequences(seq) => [Argument::NULL, seq.into()],
        Positions::Given(positions) => [(&positions).into(), 1.into()],
    }
}

pub(super) fn add_positions<D: Driver>(
    cuda: &Cuda<D>,
    AddPositions {
        x,
        table,
        positions,
    }: AddPositions,
) -> Result<(), KernelError> {
    let kernel = kernel!("positions", "add_positions", x.dtype());
    let (rows, width) = (x.dims()[0], x.dims()[1]);
    let [positions, seq] = position_arguments(positions);
    let arguments = [(&x).into(), (&table).into(), positions, seq, width.into()];
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}

pub(super) fn add_positions_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: AddPositionsBackward,
) -> Result<(), KernelError> {
    let AddPositionsBackward {
        dtable,
        dx,
        positions,
        init,
    } = operation;
    let seq = match positions {
        Positions::Sequences(seq) => seq,
        Positions::Given(ids) => {
            let dout = dx;
            return embedding_backward(
                cuda,
                EmbeddingBackward {
                    dtable,
                    dout,
                    ids,
                    init,
                },
            );
        }
    };
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
