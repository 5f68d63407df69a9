//! Layer normalisation (Ba, Kiros and Hinton 2016).

use super::dispatch::{by_dtype, by_dtypes};
use super::fp8::find_largest;
use super::simd::{CHUNK, Real, lane_sum, vectorized};
use super::{Shared, elementwise, overwrites};
use crate::operation::{BiasBackward, LayerNorm, LayerNormBackward};
use memory::Out;
use rayon::prelude::*;

/// Columns of a weight gradient that one task sums.
const COLUMNS: usize = 32;

/// Rows that are summed before their sum is added to the total, so that long sums lose little precision.
const ROWS: usize = 64;

pub(super) fn layer_norm(operation: LayerNorm) {
    by_dtype!(operation.x.dtype(), layer_norm_of(operation));
}

fn layer_norm_of<T: Real>(operation: LayerNorm) {
    let LayerNorm {
        mut y,
        mean,
        rstd,
        largest,
        x,
        weight,
        bias,
        eps,
    } = operation;
    let out = y.as_mut().map(|y| shared::<T>(y.reborrow()));
    let [mean, rstd] = [mean, rstd].map(|statistic| statistic.map(shared::<f32>));
    let (weight, bias) = (weight.slice(), bias.slice());
    let width = weight.len();
    let rows = (CHUNK / width).max(1);
    let pieces = x.slice::<T>().par_chunks(rows * width).enumerate();
    pieces.for_each(|(piece, x)| {
        let (first, rows) = (piece * rows, x.len() / width);
        // SAFETY: rows of a piece of x belong to its task alone.
        let (y, [mean, rstd]) = unsafe {
            let y = out.map(|y| part(y, first * width, x.len()));
            let statistics = [mean, rstd].map(|out| out.map(|out| part(out, first, rows)));
            (y, statistics)
        };
        normalise(y, mean, rstd, x, weight, bias, eps);
    });
    if let Some(y) = y {
        find_largest(largest, y.as_in());
    }
}

fn shared<T: Real>(out: Out) -> Shared<T> {
    Shared(out.slice_mut().as_mut_ptr())
}

/// A part of an output.
///
/// # Safety
/// The elements lie in the output, and nothing else touches them.
unsafe fn part<'a, T>(out: Shared<T>, first: usize, elements: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(out.at(first), elements) }
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

pub(super) fn layer_norm_backward(operation: LayerNormBackward) {
    let LayerNormBackward {
        dx,
        dx_init,
        dweight,
        dweight_init,
        dbias,
        dbias_init,
        dy,
        x,
        weight,
        mean,
        rstd,
    } = operation;
    elementwise::bias_backward(BiasBackward {
        out: dbias,
        dy,
        init: dbias_init,
    });
    let statistics = [mean.slice(), rstd.slice()];
    let replace = overwrites(&dweight_init);
    by_dtypes!(
        dweight.dtype(),
        x.dtype(),
        dweight_of(
            dweight.slice_mut(),
            replace,
            [dy.slice(), x.slice()],
            statistics
        )
    );
    let replace = overwrites(&dx_init);
    by_dtype!(
        x.dtype(),
        dx_of(
            dx.slice_mut(),
            replace,
            [dy.slice(), x.slice()],
            weight.slice(),
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
