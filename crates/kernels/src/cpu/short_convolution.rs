//! The short causal convolution in front of the gated delta rule.

use super::gated_delta::{COLUMNS, Documents, OutRows, ROWS, row, sigmoid};
use crate::cpu::dispatch::{by_dtype, by_dtypes};
use crate::cpu::overwrites;
use crate::cpu::simd::{Real, vectorized};
use crate::operation::{ShortConvolution, ShortConvolutionBackward, TAPS_MAX};
use memory::In;
use rayon::prelude::*;

pub(crate) fn short_convolution(op: ShortConvolution) {
    by_dtype!(op.x.dtype(), convolve(op));
}

fn convolve<T: Real>(op: ShortConvolution) {
    let &[tokens, columns] = op.out.dims() else {
        unreachable!("the check asks for two dimensions")
    };
    let documents = Documents::of(op.seq, op.documents);
    let (x, weight, taps) = (op.x, op.weight.slice::<T>(), op.weight.dims()[1]);
    let rows = op.out.slice_mut::<T>().par_chunks_mut(columns);
    rows.zip(0..tokens).for_each(|(out, token)| {
        let first = documents.first(token);
        for block in (0..columns).step_by(COLUMNS) {
            let columns = block..columns.min(block + COLUMNS);
            let mut sums = [0.0; COLUMNS];
            for back in 0..taps.min(token - first + 1) {
                let x = &row::<T>(&x, token - back)[columns.clone()];
                add_tap(
                    &mut sums,
                    x,
                    &weight[block * taps..],
                    [taps, taps - 1 - back],
                );
            }
            for (out, u) in out[columns].iter_mut().zip(sums) {
                *out = T::narrow(u * sigmoid(u));
            }
        }
    });
}

vectorized! {
    pub(crate) fn add_tap<T: Real>(sums: &mut [f32; COLUMNS], x: &[T], weight: &[T], tap: [usize; 2]) {
        let [taps, tap] = tap;
        for ((sum, x), weight) in sums.iter_mut().zip(x).zip(weight.chunks_exact(taps)) {
            *sum += weight[tap].widen() * x.widen();
        }
    }
}

pub(crate) fn short_convolution_backward(op: ShortConvolutionBackward) {
    by_dtypes!(op.dweight.dtype(), op.x.dtype(), convolve_backward(op));
}

fn convolve_backward<G: Real, T: Real>(op: ShortConvolutionBackward) {
    let documents = Documents::of(op.seq, op.documents);
    let (taps, replace) = (op.weight.dims()[1], overwrites(&op.init));
    let (dx, weight) = (OutRows::<T>::of(&op.dx), op.weight.slice::<T>());
    let tasks = op.dweight.slice_mut::<G>().par_chunks_mut(COLUMNS * taps);
    tasks.enumerate().for_each(|(task, dweight)| {
        let weight = &weight[task * COLUMNS * taps..][..dweight.len()];
        let mut columns = Columns {
            first: task * COLUMNS,
            weight,
            taps,
            total: [[0.0; COLUMNS]; TAPS_MAX],
        };
        columns.backward((&op.dout, &op.x), dx, documents);
        for (column, dweight) in dweight.chunks_exact_mut(taps).enumerate() {
            for (tap, dweight) in dweight.iter_mut().enumerate() {
                let before = if replace { 0.0 } else { dweight.widen() };
                *dweight = G::narrow(before + columns.total[tap][column]);
            }
        }
    });
}

/// Columns of a convolution's backward pass.
struct Columns<'a, T> {
    first: usize,
    weight: &'a [T],
    taps: usize,
    /// The gradients of the weights, tap by tap.
    total: [[f32; COLUMNS]; TAPS_MAX],
}

impl<T: Real> Columns<'_, T> {
    fn backward(&mut self, (dout, x): (&In, &In), dx: OutRows<T>, documents: Documents) {
        let (tokens, count, taps) = (dout.dims()[0], self.weight.len() / self.taps, self.taps);
        let columns = self.first..self.first + count;
        // The gradients of the last tokens' x, to which tokens behind them add. Token t is at t % taps.
        let mut pending = [[0.0; COLUMNS]; TAPS_MAX];
        let mut sums = [[0.0; COLUMNS]; TAPS_MAX];
        for token in 0..tokens {
            let seen = taps.min(token - documents.first(token) + 1);
            let mut du = [0.0; COLUMNS];
            for back in 0..seen {
                let x = &row::<T>(x, token - back)[columns.clone()];
                add_tap(&mut du, x, self.weight, [taps, taps - 1 - back]);
            }
            for (du, dout) in du.iter_mut().zip(&row::<T>(dout, token)[columns.clone()]) {
                let s = sigmoid(*du);
                *du = dout.widen() * s * (1.0 + *du * (1.0 - s));
            }
            pending[token % taps] = [0.0; COLUMNS];
            for back in 0..seen {
                let (tap, x) = (taps - 1 - back, &row::<T>(x, token - back)[columns.clone()]);
                let place = &mut pending[(token - back) % taps];
                add_gradients(
                    (place, &mut sums[tap]),
                    &du[..count],
                    (self.weight, x),
                    [taps, tap],
                );
            }
            if token % ROWS == ROWS - 1 || token + 1 == tokens {
                for (total, sums) in self
                    .total
                    .iter_mut()
                    .flatten()
                    .zip(sums.iter_mut().flatten())
                {
                    *total += std::mem::take(sums);
                }
            }
            let over = if token + 1 == tokens {
                (token + 1).saturating_sub(taps)..tokens
            } else {
                (token + 1).saturating_sub(taps)..(token + 2).saturating_sub(taps)
            };
            for token in over {
                // SAFETY: the columns are this task's alone.
                let dx = unsafe { dx.columns(token, self.first, count) };
                for (dx, sum) in dx.iter_mut().zip(pending[token % taps]) {
                    *dx = T::narrow(sum);
                }
            }
        }
    }
}

vectorized! {
    fn add_gradients<T: Real>(sums: (&mut [f32; COLUMNS], &mut [f32; COLUMNS]), du: &[f32], of: (&[T], &[T]), tap: [usize; 2]) {
        let ((dx, dweight), (weight, x), [taps, tap]) = (sums, of, tap);
        let places = dx.iter_mut().zip(dweight.iter_mut());
        for (((dx, dweight), du), (weight, x)) in places.zip(du).zip(weight.chunks_exact(taps).zip(x)) {
            *dx += weight[tap].widen() * du;
            *dweight += du * x.widen();
        }
    }
}
