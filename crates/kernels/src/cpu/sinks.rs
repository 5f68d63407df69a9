//! The gradient of attention's sinks.

use super::dispatch::by_dtypes;
use super::overwrites;
use super::simd::{Real, exp};
use crate::{AttentionShape, Init};
use memory::{In, Out};
use rayon::prelude::*;

/// `dsinks [heads] = init` - the sums of e^(sink - lse) times `row_sum` over all rows of a head, in their order. `row_sum` gives the sum of
/// `dout * out` of a row of `lse [b, heads, s]`.
pub(super) fn sink_gradient(
    (dsinks, init): (Out, &Init),
    [sinks, lse]: [In; 2],
    shape: AttentionShape,
    row_sum: impl Fn(usize) -> f32 + Sync,
) {
    let lse = lse.slice::<f32>();
    let term = |sink: f32, row: usize| f64::from(exp(sink - lse[row]) * row_sum(row));
    by_dtypes!(
        dsinks.dtype(),
        sinks.dtype(),
        sums_of_heads(
            dsinks.slice_mut(),
            overwrites(init),
            sinks.slice(),
            shape,
            term
        )
    );
}

fn sums_of_heads<G: Real, T: Real>(
    dsinks: &mut [G],
    overwrite: bool,
    sinks: &[T],
    shape: AttentionShape,
    term: impl Fn(f32, usize) -> f64 + Sync,
) {
    let AttentionShape {
        batch, seq, heads, ..
    } = shape;
    let gradients = dsinks.par_iter_mut().zip(sinks).enumerate();
    gradients.for_each(|(head, (dsink, sink))| {
        let rows = (0..batch).flat_map(|sequence| {
            let first = (sequence * heads + head) * seq;
            first..first + seq
        });
        let sum: f64 = rows.map(|row| term(sink.widen(), row)).sum();
        let before = if overwrite { 0.0 } else { dsink.widen() };
        *dsink = G::narrow((f64::from(before) - sum) as f32);
    });
}
