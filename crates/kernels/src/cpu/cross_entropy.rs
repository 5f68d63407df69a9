//! Cross-entropy with its gradient in place of the logits.

use super::simd::{Real, exp, lane_max, lane_sum, vectorized};
use rayon::prelude::*;

pub(super) fn cross_entropy<T: Real>(
    losses: &mut [f32],
    logits: &mut [T],
    targets: &[i32],
    scale: f32,
) {
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
        let n = logits.len();
        let largest = lane_max(n, |index| logits[index].widen());
        let sum = lane_sum(n, |index| exp(logits[index].widen() - largest));
        let loss = sum.ln() + largest - logits[target].widen();
        let factor = scale / sum;
        let at_target = exp(logits[target].widen() - largest) * factor - scale;
        for logit in logits.iter_mut() {
            *logit = T::narrow(exp(logit.widen() - largest) * factor);
        }
        logits[target] = T::narrow(at_target);
        loss
    }
}
