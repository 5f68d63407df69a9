//! Sums over whole arenas.

use super::simd::{Real, lane_sum, vectorized};
use rayon::prelude::*;

/// Elements whose squares are summed in f32 before they join an f64 sum.
const BLOCK: usize = 4096;

pub(super) fn sum(out: &mut [f32], x: &[f32], overwrite: bool) {
    let sum: f64 = x.iter().map(|value| f64::from(*value)).sum();
    out[0] = if overwrite {
        sum as f32
    } else {
        (f64::from(out[0]) + sum) as f32
    };
}

pub(super) fn norm_and_clip<T: Real>(
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
