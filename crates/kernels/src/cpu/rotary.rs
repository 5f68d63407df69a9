//! Rotary position embedding (Su et al. 2021), pairing the halves of a head as Hugging Face does.

use super::dispatch::by_dtype;
use super::positions::position;
use super::simd::{CHUNK, Real, vectorized};
use super::{Shared, part};
use crate::operation::{Positions, Rotary};
use memory::In;
use rayon::prelude::*;

pub(super) fn rotary(op: Rotary) {
    by_dtype!(op.x.dtype(), rotary_of(op));
}

fn rotary_of<T: Real>(op: Rotary) {
    let (&[tokens, width], stride) = (op.x.dims(), op.x.strides()[0]) else {
        unreachable!("the check asks for two dimensions");
    };
    let x = Shared(op.x.pointer().cast::<T>());
    let at_a_time = (CHUNK / width.max(1)).max(1);
    let tokens = (0..tokens).into_par_iter().with_min_len(at_a_time);
    tokens.for_each(|token| {
        // SAFETY: the row lies within the view, which is exclusive, and is this task's alone.
        let row = unsafe { part(x, token * stride, width) };
        let angles = angles(op.table, op.positions, token);
        rotate(row, op.head_dim, angles, op.inverse);
    });
}

/// The cosines and the sines of a token's position.
pub(super) fn angles<'a>(table: In<'a>, positions: Positions, token: usize) -> [&'a [f32]; 2] {
    let half = table.dims()[2];
    let (cosines, sines) = table.slice().split_at(table.elements() / 2);
    let first = position(positions, token) * half;
    [cosines, sines].map(|of_all| &of_all[first..first + half])
}

vectorized! {
    /// Turns the heads of one token.
    pub(super) fn rotate<T: Real>(x: &mut [T], head_dim: usize, angles: [&[f32]; 2], inverse: bool) {
        let [cosines, sines] = angles;
        let half = cosines.len();
        let sign = if inverse { -1.0 } else { 1.0 };
        for head in x.chunks_exact_mut(head_dim) {
            let (low, high) = head[..2 * half].split_at_mut(half);
            for ((low, high), (cosine, sine)) in low.iter_mut().zip(high).zip(cosines.iter().zip(sines)) {
                let (a, b, sine) = (low.widen(), high.widen(), sign * sine);
                *low = T::narrow(a * cosine - b * sine);
                *high = T::narrow(b * cosine + a * sine);
            }
        }
    }
}
