//! Root-mean-square normalisation (Zhang and Sennrich 2019).

use super::dispatch::{by_dtype, by_dtypes};
use super::fp8::{ValuesOrCodes, find_largest};
use super::simd::{CHUNK, Real, lane_sum, vectorized};
use super::{overwrites, part, shared};
use crate::operation::{RmsNorm, RmsNormBackward};
use rayon::prelude::*;

/// The number added to each weight: 1 for `plus_one`, otherwise -0, because adding 0 would turn a weight of -0 into 0.
fn added_to_weights(plus_one: bool) -> f32 {
    if plus_one { 1.0 } else { -0.0 }
}

/// Columns of a weight gradient that one task sums.
const COLUMNS: usize = 32;

/// Rows that are summed before their sum is added to the total, so that long sums lose little precision.
const ROWS: usize = 64;

pub(super) fn rms_norm(op: RmsNorm) {
    by_dtype!(op.x.dtype(), rms_norm_of(op));
}

fn rms_norm_of<T: Real>(mut op: RmsNorm) {
    let out = op.y.as_mut();
    let out = out.map(|y| ValuesOrCodes::<T>::of(y.reborrow(), &op.form));
    let rstd = op.rstd.map(shared::<f32>);
    let (weight, width) = (op.weight.slice(), op.weight.elements());
    let (rows, added) = ((CHUNK / width).max(1), added_to_weights(op.plus_one));
    let pieces = op.x.slice::<T>().par_chunks(rows * width).enumerate();
    pieces.for_each(|(piece, x)| {
        let (first, rows) = (piece * rows, x.len() / width);
        // SAFETY: rows of a piece of x belong to its task alone.
        unsafe {
            let rstd = rstd.map(|rstd| part(rstd, first, rows));
            let make = |y: Option<&mut [T]>| normalise(y, rstd, x, (weight, added), op.eps);
            match out {
                Some(out) => out.make(first * width, x.len(), |y| make(Some(y))),
                None => make(None),
            }
        }
    });
    if let Some(y) = op.y {
        find_largest(op.form, y.as_in());
    }
}

vectorized! {
    fn normalise<T: Real>(y: Option<&mut [T]>, rstd: Option<&mut [f32]>, x: &[T], factors: (&[T], f32), eps: f32) {
        let (weight, added) = factors;
        let width = weight.len();
        let (mut y, mut rstd) = (y, rstd);
        for (row, x) in x.chunks_exact(width).enumerate() {
            let mean_square = lane_sum([x], |[x]| x * x) / width as f32;
            let scale = 1.0 / (mean_square + eps).sqrt();
            if let Some(y) = y.as_deref_mut() {
                let y = &mut y[row * width..(row + 1) * width];
                for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                    *y = T::narrow(x.widen() * scale * (weight.widen() + added));
                }
            }
            if let Some(rstd) = rstd.as_deref_mut() {
                rstd[row] = scale;
            }
        }
    }
}

pub(super) fn rms_norm_backward(op: RmsNormBackward) {
    let rstd = op.rstd.slice();
    let replace = overwrites(&op.dweight_init);
    by_dtypes!(
        op.dweight.dtype(),
        op.x.dtype(),
        dweight_of(
            op.dweight.slice_mut(),
            replace,
            op.dy.slice(),
            op.x.slice(),
            rstd
        )
    );
    let replace = overwrites(&op.dx_init);
    by_dtype!(
        op.x.dtype(),
        dx_of(
            op.dx.slice_mut(),
            replace,
            op.dy.slice(),
            op.x.slice(),
            (op.weight.slice(), added_to_weights(op.plus_one)),
            rstd
        )
    );
}

/// Gradient of the weight: column by column, rows in order.
fn dweight_of<G: Real, T: Real>(
    dweight: &mut [G],
    overwrite: bool,
    dy: &[T],
    x: &[T],
    rstd: &[f32],
) {
    let width = dweight.len();
    dweight
        .par_chunks_mut(COLUMNS)
        .enumerate()
        .for_each(|(block, dweight)| {
            let mut sums = [0.0; COLUMNS];
            let first = block * COLUMNS;
            column_sums(&mut sums, dy, x, rstd, width, first, dweight.len());
            for (dweight, sum) in dweight.iter_mut().zip(sums) {
                *dweight = G::narrow(if overwrite {
                    sum
                } else {
                    dweight.widen() + sum
                });
            }
        });
}

vectorized! {
    fn column_sums<T: Real>(
        total: &mut [f32; COLUMNS],
        dy: &[T],
        x: &[T],
        rstd: &[f32],
        width: usize,
        first: usize,
        columns: usize,
    ) {
        let rows = dy.chunks(ROWS * width).zip(x.chunks(ROWS * width)).zip(rstd.chunks(ROWS));
        for ((dy, x), rstd) in rows {
            let mut sums = [0.0f32; COLUMNS];
            for ((dy, x), rstd) in dy.chunks_exact(width).zip(x.chunks_exact(width)).zip(rstd) {
                let pairs = dy[first..first + columns].iter().zip(&x[first..first + columns]);
                for (sum, (dy, x)) in sums.iter_mut().zip(pairs) {
                    *sum += dy.widen() * (x.widen() * *rstd);
                }
            }
            for (total, sum) in total.iter_mut().zip(sums) {
                *total += sum;
            }
        }
    }
}

/// Gradient of the input.
fn dx_of<T: Real>(
    dx: &mut [T],
    overwrite: bool,
    dy: &[T],
    x: &[T],
    factors: (&[T], f32),
    rstd: &[f32],
) {
    let width = factors.0.len();
    let rows = (CHUNK / width).max(1);
    let step = rows * width;
    let inputs = dy
        .par_chunks(step)
        .zip(x.par_chunks(step))
        .zip(rstd.par_chunks(rows));
    dx.par_chunks_mut(step)
        .zip(inputs)
        .for_each(|(dx, ((dy, x), rstd))| dx_rows(dx, overwrite, dy, x, factors, rstd));
}

vectorized! {
    fn dx_rows<T: Real>(dx: &mut [T], overwrite: bool, dy: &[T], x: &[T], factors: (&[T], f32), rstd: &[f32]) {
        let (weight, added) = factors;
        let width = weight.len();
        for (row, rstd) in rstd.iter().enumerate() {
            let range = row * width..(row + 1) * width;
            let (dx, dy, x) = (&mut dx[range.clone()], &dy[range.clone()], &x[range]);
            let dot = lane_sum([dy, weight, x], |[dy, weight, x]| dy * (weight + added) * x);
            let correction = dot * rstd * rstd * rstd / width as f32;
            for (((dx, dy), x), weight) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
                let gradient = dy.widen() * (weight.widen() + added) * rstd - x.widen() * correction;
                *dx = T::narrow(if overwrite { gradient } else { dx.widen() + gradient });
            }
        }
    }
}
