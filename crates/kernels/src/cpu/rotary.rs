//! Rotary position embedding (Su et al. 2021), pairing the halves of a head as Hugging Face does.

use super::dispatch::by_dtype;
use super::positions::position;
use super::simd::{CHUNK, Real, vectorized};
use crate::operation::Rotary;
use rayon::prelude::*;

pub(super) fn rotary(operation: Rotary) {
    by_dtype!(operation.x.dtype(), rotary_of(operation));
}

fn rotary_of<T: Real>(operation: Rotary) {
    let Rotary {
        x,
        table,
        positions,
        inverse,
    } = operation;
    let (width, half) = (x.dims()[1], table.dims()[2]);
    let (x, table) = (x.slice_mut::<T>(), table.slice());
    let (cosines, sines) = table.split_at(table.len() / 2);
    let rows = (CHUNK / width).max(1);
    x.par_chunks_mut(rows * width)
        .enumerate()
        .for_each(|(chunk, x)| {
            for (row, x) in x.chunks_exact_mut(width).enumerate() {
                let position = position(positions, chunk * rows + row) * half;
                rotate(
                    x,
                    &cosines[position..position + half],
                    &sines[position..position + half],
                    inverse,
                );
            }
        });
}

vectorized! {
    fn rotate<T: Real>(x: &mut [T], cosines: &[f32], sines: &[f32], inverse: bool) {
        let half = cosines.len();
        let sign = if inverse { -1.0 } else { 1.0 };
        for head in x.chunks_exact_mut(2 * half) {
            let (low, high) = head.split_at_mut(half);
            for ((low, high), (cosine, sine)) in low.iter_mut().zip(high).zip(cosines.iter().zip(sines)) {
                let (a, b, sine) = (low.widen(), high.widen(), sign * sine);
                *low = T::narrow(a * cosine - b * sine);
                *high = T::narrow(b * cosine + a * sine);
            }
        }
    }
}
