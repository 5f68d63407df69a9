//! Learned positions.

use super::embedding::embedding_backward;
use super::extent::Extent;
use super::{Argument, Cuda, Driver, accumulates, arguments, kernel};
use crate::Result;
use crate::operation::{AddPositions, AddPositionsBackward, EmbeddingBackward, Positions};

/// The given positions, or a null pointer and the length of sequences.
pub(super) fn position_arguments(positions: Positions) -> [Argument; 2] {
    match positions {
        Positions::Sequences(seq) => arguments![Argument::NULL, seq],
        Positions::Given(positions) => arguments![&positions, 1],
    }
}

pub(super) fn add_positions<D: Driver>(cuda: &Cuda<D>, op: AddPositions) -> Result {
    let kernel = kernel!("positions", "add_positions", op.x.dtype());
    let (rows, width) = (op.x.dims()[0], op.x.dims()[1]);
    let [positions, seq] = position_arguments(op.positions);
    let arguments = arguments![&op.x, &op.table, positions, seq, width];
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}

pub(super) fn add_positions_backward<D: Driver>(
    cuda: &Cuda<D>,
    op: AddPositionsBackward,
) -> Result {
    let seq = match op.positions {
        Positions::Sequences(seq) => seq,
        Positions::Given(ids) => {
            let as_lookup = EmbeddingBackward {
                dtable: op.dtable,
                dout: op.dx,
                ids,
                init: op.init,
            };
            return embedding_backward(cuda, as_lookup);
        }
    };
    let types = [op.dtable.dtype(), op.dx.dtype()];
    let kernel = kernel!("positions", "add_positions_backward", types[0], types[1]);
    let (positions, width) = (op.dtable.dims()[0], op.dtable.dims()[1]);
    let arguments = arguments! {
        &op.dtable, &op.dx, op.dx.dims()[0] / seq, seq, width, accumulates(&op.init),
    };
    cuda.launch(kernel, Extent::rows(positions, width), &arguments)
}
