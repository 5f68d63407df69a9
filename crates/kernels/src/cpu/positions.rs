//! Learned positions.

use super::dispatch::{by_dtype, by_dtypes};
use super::embedding::embedding_backward;
use super::overwrites;
use super::simd::{CHUNK, Real, vectorized};
use crate::operation::{AddPositions, AddPositionsBackward, EmbeddingBackward, Positions};
use memory::Out;
use rayon::prelude::*;

/// Columns of a position's gradient that are summed at a time.
const COLUMNS: usize = 1024;

/// The position of a token.
pub(super) fn position(positions: Positions, token: usize) -> usize {
    match positions {
        Positions::Sequences(seq) => token % seq,
        Positions::Given(positions) => positions.slice::<i32>()[token] as usize,
    }
}

pub(super) fn add_positions(op: AddPositions) {
    by_dtype!(op.x.dtype(), add_positions_of(op));
}

fn add_positions_of<T: Real>(op: AddPositions) {
    let table = op.table.slice::<T>();
    let width = op.x.dims()[1];
    let rows = (CHUNK / width).max(1);
    let pieces =
        op.x.slice_mut::<T>()
            .par_chunks_mut(rows * width)
            .enumerate();
    pieces.for_each(|(piece, x)| {
        for (row, x) in (piece * rows..).zip(x.chunks_exact_mut(width)) {
            add_row(x, &table[position(op.positions, row) * width..][..width]);
        }
    });
}

pub(super) fn add_positions_backward(op: AddPositionsBackward) {
    let seq = match op.positions {
        Positions::Sequences(seq) => seq,
        // Given positions are row numbers, so this is a lookup as for tokens.
        Positions::Given(ids) => {
            return embedding_backward(EmbeddingBackward {
                dtable: op.dtable,
                dout: op.dx,
                ids,
                init: op.init,
            });
        }
    };
    by_dtypes!(
        op.dtable.dtype(),
        op.dx.dtype(),
        add_positions_backward_of(op.dtable, op.dx.slice(), seq, overwrites(&op.init))
    );
}

/// A task sums the rows of some positions, each over the sequences in order.
fn add_positions_backward_of<G: Real, T: Real>(dtable: Out, dx: &[T], seq: usize, overwrite: bool) {
    let width = dtable.dims()[1];
    let rows = (CHUNK / width).max(1);
    let dtable = dtable.slice_mut::<G>();
    let (seen, beyond) = dtable.split_at_mut(seq * width);
    let pieces = seen.par_chunks_mut(rows * width).enumerate();
    pieces.for_each(|(piece, dtable)| {
        for (position, row) in (piece * rows..).zip(dtable.chunks_exact_mut(width)) {
            for (block, row) in row.chunks_mut(COLUMNS).enumerate() {
                let first = position * width + block * COLUMNS;
                sum_sequences(row, &dx[first..], seq * width, overwrite);
            }
        }
    });
    if overwrite {
        beyond.fill(G::narrow(0.0));
    }
}

fn sum_sequences<G: Real, T: Real>(row: &mut [G], dx: &[T], step: usize, overwrite: bool) {
    let mut sums = [0.0f32; COLUMNS];
    let sums = &mut sums[..row.len()];
    for dx in dx.chunks(step) {
        sum_row(sums, &dx[..row.len()]);
    }
    for (out, sum) in row.iter_mut().zip(sums) {
        *out = G::narrow(if overwrite { *sum } else { out.widen() + *sum });
    }
}

vectorized! {
    fn add_row<T: Real>(x: &mut [T], row: &[T]) {
        for (x, row) in x.iter_mut().zip(row) {
            *x = T::narrow(x.widen() + row.widen());
        }
    }

    fn sum_row<T: Real>(sums: &mut [f32], row: &[T]) {
        for (sum, row) in sums.iter_mut().zip(row) {
            *sum += row.widen();
        }
    }
}
