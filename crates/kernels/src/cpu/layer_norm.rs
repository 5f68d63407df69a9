//! Layer normalisation (Ba, Kiros and Hinton 2016).

use super::dispatch::{by_dtype, by_dtypes};
use super::fp8::{ValuesOrCodes, find_largest};
use super::simd::{CHUNK, Real, lane_sum, vectorized};
use super::{elementwise, overwrites, part, shared};
use crate::operation::{BiasBackward, LayerNorm, LayerNormBackward};
use rayon::prelude::*;

/// Columns of a weight gradient that one task sums.
const COLUMNS: usize = 32;

/// Rows that are summed before their sum is added to the total, so that long sums lose little precision.
const ROWS: usize = 64;

pub(super) fn layer_norm(op: LayerNorm) {
    by_dtype!(op.x.dtype(), layer_norm_of(op));
}

fn layer_norm_of<T: Real>(mut op: LayerNorm) {
    let out = op.y.as_mut();
    let out = out.map(|y| ValuesOrCodes::<T>::of(y.reborrow(), &op.form));
    let [mean, rstd] = [op.mean, op.rstd].map(|statistic| statistic.map(shared::<f32>));
    let (weight, bias) = (op.weight.slice(), op.bias.slice());
    let width = weight.len();
    let rows = (CHUNK / width).max(1);
    let pieces = op.x.slice::<T>().par_chunks(rows * width).enumerate();
    pieces.for_each(|(piece, x)| {
        let (first, rows) = (piece * rows, x.len() / width);
        // SAFETY: rows of a piece of x belong to its task alone.
        unsafe {
            let [mean, rstd] = [mean, rstd].map(|out| out.map(|out| part(out, first, rows)));
            let make = |y: Option<&mut [T]>| normalise(y, mean, rstd, x, weight, bias, op.eps);
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
    /// Computes the variance after the mean. The difference of the mean square and the squared mean would lose
    /// precision if the mean is large.
    fn normalise<T: Real>(
        y: Option<&mut [T]>,
        mean: Option<&mut [f32]>,
        rstd: Option<&mut [f32]>,
        x: &[T],
        weight: &[T],
        bias: &[T],
        eps: f32,
    ) {
        let width = weight.len();
        let (mut y, mut means, mut rstds) = (y, mean, rstd);
        for (row, x) in x.chunks_exact(width).enumerate() {
            let mean = lane_sum([x], |[x]| x) / width as f32;
            let variance = lane_sum([x], |[x]| (x - mean) * (x - mean)) / width as f32;
            let rstd = 1.0 / (variance + eps).sqrt();
            if let Some(y) = y.as_deref_mut() {
                let y = &mut y[row * width..(row + 1) * width];
                for (((y, x), weight), bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                    *y = T::narrow((x.widen() - mean) * rstd * weight.widen() + bias.widen());
                }
            }
            if let Some(means) = means.as_deref_mut() {
                means[row] = mean;
            }
            if let Some(rstds) = rstds.as_deref_mut() {
                rstds[row] = rstd;
            }
        }
    }
}

pub(super) fn layer_norm_backward(op: LayerNormBackward) {
    elementwise::bias_backward(BiasBackward {
        out: op.dbias.into(),
        dy: op.dy,
        init: op.dbias_init,
    });
    let statistics = [op.mean.slice(), op.rstd.slice()];
    let replace = overwrites(&op.dweight_init);
    by_dtypes!(
        op.dweight.dtype(),
        op.x.dtype(),
        dweight_of(
            op.dweight.slice_mut(),
            replace,
            [op.dy.slice(), op.x.slice()],
            statistics
        )
    );
    let replace = overwrites(&op.dx_init);
    by_dtype!(
        op.x.dtype(),
        dx_of(
            op.dx.slice_mut(),
            replace,
            [op.dy.slice(), op.x.slice()],
            op.weight.slice(),
            statistics
        )
    );
}

/// Gradient of the weight: column by column, rows in order.
fn dweight_of<G: Real, T: Real>(
    dweight: &mut [G],
    overwrite: bool,
    inputs: [&[T]; 2],
    statistics: [&[f32]; 2],
) {
    let width = dweight.len();
    let blocks = dweight.par_chunks_mut(COLUMNS).enumerate();
    blocks.for_each(|(block, dweight)| {
        let mut sums = [0.0; COLUMNS];
        let columns = (block * COLUMNS, dweight.len());
        column_sums(&mut sums, inputs, statistics, width, columns);
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
        inputs: [&[T]; 2],
        statistics: [&[f32]; 2],
        width: usize,
        columns: (usize, usize),
    ) {
        let ([dy, x], [mean, rstd]) = (inputs, statistics);
        let own = columns.0..columns.0 + columns.1;
        let statistics = mean.chunks(ROWS).zip(rstd.chunks(ROWS));
        let blocks = dy.chunks(ROWS * width).zip(x.chunks(ROWS * width)).zip(statistics);
        for ((dy, x), (mean, rstd)) in blocks {
            let mut sums = [0.0f32; COLUMNS];
            let rows = dy.chunks_exact(width).zip(x.chunks_exact(width));
            for ((dy, x), (mean, rstd)) in rows.zip(mean.iter().zip(rstd)) {
                let pairs = dy[own.clone()].iter().zip(&x[own.clone()]);
                for (sum, (dy, x)) in sums.iter_mut().zip(pairs) {
                    *sum += dy.widen() * ((x.widen() - mean) * rstd);
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
    [dy, x]: [&[T]; 2],
    weight: &[T],
    [mean, rstd]: [&[f32]; 2],
) {
    let width = weight.len();
    let rows = (CHUNK / width).max(1);
    let step = rows * width;
    let inputs = dy.par_chunks(step).zip(x.par_chunks(step));
    let statistics = mean.par_chunks(rows).zip(rstd.par_chunks(rows));
    dx.par_chunks_mut(step)
        .zip(inputs.zip(statistics))
        .for_each(|(dx, ((dy, x), (mean, rstd)))| {
            dx_rows(dx, overwrite, [dy, x], weight, [mean, rstd])
        });
}

vectorized! {
    fn dx_rows<T: Real>(
        dx: &mut [T],
        overwrite: bool,
        inputs: [&[T]; 2],
        weight: &[T],
        statistics: [&[f32]; 2],
    ) {
        let width = weight.len();
        let ([dy, x], [mean, rstd]) = (inputs, statistics);
        for (row, (mean, rstd)) in mean.iter().zip(rstd).enumerate() {
            let range = row * width..(row + 1) * width;
            let (dx, dy, x) = (&mut dx[range.clone()], &dy[range.clone()], &x[range]);
            let shift = lane_sum([dy, weight], |[dy, weight]| dy * weight) / width as f32;
            let dot = lane_sum([dy, weight, x], |[dy, weight, x]| dy * weight * (x - mean));
            let slope = dot * rstd * rstd / width as f32;
            for (((dx, dy), x), weight) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
                let gradient = (dy.widen() * weight.widen() - shift - (x.widen() - mean) * slope) * rstd;
                *dx = T::narrow(if overwrite { gradient } else { dx.widen() + gradient });
            }
        }
    }
}
