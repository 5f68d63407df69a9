//! Rotary position embedding (Su et al. 2021), pairing the halves of a head as Hugging Face does.

use super::dispatch::by_dtype;
use super::positions::position;
use super::simd::{CHUNK, Real, vectorized};
use crate::operation::{Positions, Rotary};
use memory::In;
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
    let width = x.dims()[1];
    let x = x.slice_mut::<T>();
    let rows = (CHUNK / width).max(1);
    x.par_chunks_mut(rows * width)
        .enumerate()
        .for_each(|(chunk, x)| {
            for (row, x) in x.chunks_exact_mut(width).enumerate() {
                turn_row(x, table, positions, chunk * rows + row, inverse);
            }
        });
}

/// Turns the heads of one token.
pub(super) fn turn_row<T: Real>(
    x: &mut [T],
    table: In,
    positions: Positions,
    token: usize,
    inverse: bool,
) {
    let [cosines, sines] = angles(table, positions, token);
    rotate(x, cosines, sines, inverse);
}

/// The cosines and the sines of a token's position.
pub(super) fn angles<'a>(table: In<'a>, positions: Positions, token: usize) -> [&'a [f32]; 2] {
    let half = table.dims()[2];
    let (cosines, sines) = table.slice().split_at(table.elements() / 2);
    let first = position(positions, token) * half;
    [cosines, sines].map(|of_all| &of_all[first..first + half])
}

vectorized! {
    pub(super) fn rotate<T: Real>(x: &mut [T], cosines: &[f32], sines: &[f32], inverse: bool) {
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
