//! Token embedding.

use super::dispatch::{by_dtype, by_dtypes};
use super::overwrites;
use super::simd::Real;
use crate::operation::{Embedding, EmbeddingBackward};
use memory::{In, Out};
use rayon::prelude::*;

/// Tokens that one task looks up.
const TOKENS: usize = 64;

/// Columns of a token's gradient that are summed at a time.
const COLUMNS: usize = 128;

/// Pieces that the table is cut into for its gradient.
const PIECES: usize = 64;

pub(super) fn embedding(Embedding { out, table, ids }: Embedding) {
    by_dtype!(
        table.dtype(),
        embedding_of(out.slice_mut(), table, ids.slice())
    );
}

fn embedding_of<T: Real>(out: &mut [T], table: In, ids: &[i32]) {
    let width = table.dims()[1];
    let table = table.slice::<T>();
    out.par_chunks_mut(TOKENS * width)
        .zip(ids.par_chunks(TOKENS))
        .for_each(|(out, ids)| {
            for (row, id) in out.chunks_exact_mut(width).zip(ids) {
                let start = *id as usize * width;
                row.copy_from_slice(&table[start..start + width]);
            }
        });
}

pub(super) fn embedding_backward(op: EmbeddingBackward) {
    by_dtypes!(
        op.dtable.dtype(),
        op.dout.dtype(),
        embedding_backward_of(
            op.dtable,
            op.dout.slice(),
            op.ids.slice(),
            overwrites(&op.init)
        )
    );
}

/// Every task owns a range of the vocabulary. At a token's first occurrence, all its occurrences are summed in f32, in
/// their order, and added to its row once.
fn embedding_backward_of<G: Real, T: Real>(dtable: Out, dout: &[T], ids: &[i32], overwrite: bool) {
    let (vocabulary, width) = (dtable.dims()[0], dtable.dims()[1]);
    let rows = vocabulary.div_ceil(PIECES);
    dtable
        .slice_mut::<G>()
        .par_chunks_mut(rows * width)
        .enumerate()
        .for_each(|(piece, dtable)| {
            if overwrite {
                dtable.fill(G::narrow(0.0));
            }
            let first = piece * rows;
            let owned = first..first + dtable.len() / width;
            for (token, id) in ids.iter().enumerate() {
                if owned.contains(&(*id as usize)) && !ids[..token].contains(id) {
                    let start = (*id as usize - first) * width;
                    let row = &mut dtable[start..start + width];
                    add_occurrences(row, &dout[token * width..], &ids[token..], *id);
                }
            }
        });
}

fn add_occurrences<G: Real, T: Real>(row: &mut [G], dout: &[T], ids: &[i32], id: i32) {
    let width = row.len();
    // Side by side, since a row may be that of padding, which most tokens may be.
    let blocks = row.par_chunks_mut(COLUMNS).enumerate();
    blocks.for_each(|(block, row)| {
        let mut sums = [0.0f32; COLUMNS];
        let start = block * COLUMNS;
        let occurrences = ids.iter().zip(dout.chunks_exact(width));
        for (_, dout) in occurrences.filter(|(other, _)| **other == id) {
            let dout = &dout[start..start + row.len()];
            sums.iter_mut()
                .zip(dout)
                .for_each(|(sum, dout)| *sum += dout.widen());
        }
        for (out, sum) in row.iter_mut().zip(sums) {
            *out = G::narrow(out.widen() + sum);
        }
    });
}
