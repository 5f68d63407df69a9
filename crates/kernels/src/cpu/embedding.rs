//! Token embedding.

use super::simd::Real;
use memory::{In, Out};
use rayon::prelude::*;

/// Tokens that one task looks up.
const TOKENS: usize = 64;

/// Pieces that the table is cut into for its gradient.
const PIECES: usize = 64;

pub(super) fn embedding<T: Real>(out: &mut [T], table: In, ids: &[i32]) {
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

/// Every task owns a range of the vocabulary and adds its tokens in their order.
pub(super) fn embedding_backward<T: Real>(dtable: Out, dout: &[T], ids: &[i32], overwrite: bool) {
    let (vocabulary, width) = (dtable.dims()[0], dtable.dims()[1]);
    let rows = vocabulary.div_ceil(PIECES);
    dtable
        .slice_mut::<f32>()
        .par_chunks_mut(rows * width)
        .enumerate()
        .for_each(|(piece, dtable)| {
            if overwrite {
                dtable.fill(0.0);
            }
            let first = piece * rows;
            let owned = first..first + dtable.len() / width;
            for (id, dout) in ids.iter().zip(dout.chunks_exact(width)) {
                let id = *id as usize;
                if owned.contains(&id) {
                    let start = (id - first) * width;
                    for (sum, dout) in dtable[start..start + width].iter_mut().zip(dout) {
                        *sum += dout.widen();
                    }
                }
            }
        });
}
