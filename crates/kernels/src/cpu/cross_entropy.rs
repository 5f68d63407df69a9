//! Cross-entropy with its gradient in place of the logits.

use super::dispatch::by_dtype;
use super::simd::{Real, exp, lane_max, lane_sum, vectorized};
use crate::operation::CrossEntropy;
use rayon::prelude::*;

pub(super) fn cross_entropy(op: CrossEntropy) {
    let scale = op.scale.map_or(1.0, |scale| scale.slice::<f32>()[0]);
    let losses = op.losses.slice_mut();
    by_dtype!(
        op.logits.dtype(),
        cross_entropy_of(losses, op.logits.slice_mut(), op.targets.slice(), scale)
    );
}

fn cross_entropy_of<T: Real>(losses: &mut [f32], logits: &mut [T], targets: &[i32], scale: f32) {
    let vocabulary = logits.len() / losses.len().max(1);
    if vocabulary == 0 {
        return;
    }
    let rows = logits
        .par_chunks_mut(vocabulary)
        .zip(losses.par_iter_mut())
        .zip(targets);
    rows.for_each(|((logits, loss), target)| match usize::try_from(*target) {
        Ok(target) => *loss = row(logits, target, scale),
        Err(_) => {
            *loss = 0.0;
            logits.fill(T::narrow(0.0));
        }
    });
}

vectorized! {
    /// Returns the loss of one token and replaces its logits by their gradient.
    fn row<T: Real>(logits: &mut [T], target: usize, scale: f32) -> f32 {
        let largest = lane_max(logits);
        let at_target = logits[target].widen() - largest;
        // f32 has room for the exponentials in place; bf16 would round them before they are scaled.
        let sum = if T::WIDEN {
            lane_sum([&*logits], |[logit]| exp(logit - largest))
        } else {
            logits.iter_mut().for_each(|logit| *logit = T::narrow(exp(logit.widen() - largest)));
            lane_sum([&*logits], |[exponential]| exponential)
        };
        let factor = scale / sum;
        for logit in logits.iter_mut() {
            let value = logit.widen();
            let exponential = if T::WIDEN { exp(value - largest) } else { value };
            *logit = T::narrow(exponential * factor);
        }
        logits[target] = T::narrow(exp(at_target) * factor - scale);
        sum.ln() - at_target
    }
}
