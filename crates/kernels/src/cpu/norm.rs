//! Sums over whole arenas.

use super::dispatch::by_dtype;
use super::overwrites;
use super::simd::{Real, lane_sum, vectorized};
use crate::operation::{NormAndClip, Sum};
use rayon::prelude::*;

/// Elements whose squares are summed in f32 before they join an f64 sum.
const BLOCK: usize = 4096;

pub(super) fn sum(Sum { out, x, init }: Sum) {
    let (out, x) = (out.slice_mut::<f32>(), x.slice::<f32>());
    let sum: f64 = x.iter().map(|value| f64::from(*value)).sum();
    out[0] = if overwrites(&init) {
        sum as f32
    } else {
        (f64::from(out[0]) + sum) as f32
    };
}

pub(super) fn norm_and_clip(operation: NormAndClip) {
    let NormAndClip {
        out,
        parts,
        x,
        loss,
        max_norm,
    } = operation;
    let (out, parts, loss) = (out.slice_mut(), parts.slice_mut(), loss.slice()[0]);
    by_dtype!(
        x.dtype(),
        norm_and_clip_of(out, parts, x.slice(), loss, max_norm)
    );
}

fn norm_and_clip_of<T: Real>(
    out: &mut [f32],
    parts: &mut [f64],
    x: &[T],
    loss: f32,
    max_norm: Option<f32>,
) {
    let part = x.len().div_ceil(parts.len()).next_multiple_of(BLOCK);
    parts.par_iter_mut().enumerate().for_each(|(index, sum)| {
        let start = (index * part).min(x.len());
        let end = (start + part).min(x.len());
        *sum = x[start..end]
            .chunks(BLOCK)
            .map(|block| f64::from(sum_of_squares(block)))
            .sum();
    });
    let norm = parts.iter().sum::<f64>().sqrt() as f32;
    let factor = match max_norm {
        _ if !(norm.is_finite() && loss.is_finite()) => f32::NAN,
        Some(max_norm) => (max_norm / (norm + 1e-6)).min(1.0),
        None => 1.0,
    };
    out.copy_from_slice(&[norm, factor]);
}

vectorized! {
    fn sum_of_squares<T: Real>(x: &[T]) -> f32 {
        lane_sum([x], |[x]| x * x)
    }
}
