//! The loss of a policy gradient, with its gradient.

use crate::operation::PolicyGradientLoss;
use rayon::prelude::*;
use std::ops::Range;

/// The inputs of all tokens, and the numbers of the loss.
struct Tokens<'a> {
    losses: &'a [f32],
    old: &'a [f32],
    reference: Option<&'a [f32]>,
    advantages: &'a [f32],
    weights: &'a [f32],
    clip: [f32; 2],
    beta: f32,
    by_sequence: bool,
}

pub(super) fn policy_loss(op: PolicyGradientLoss) {
    let [rows, seq] = [op.factors.dims()[0], op.factors.dims()[1]];
    let (factors, marks) = (op.factors.slice_mut::<f32>(), op.marks.slice_mut::<f32>());
    let tokens = Tokens {
        losses: op.losses.slice(),
        old: op.old.slice(),
        reference: op.reference.map(|reference| reference.slice()),
        advantages: op.advantages.slice(),
        weights: op.weights.slice(),
        clip: [1.0 - op.clip_low, 1.0 + op.clip_high],
        beta: op.beta,
        by_sequence: op.by_sequence,
    };
    let sequences = factors.par_chunks_mut(seq.max(1)).enumerate();
    let sums = sequences.map(|(row, factors)| tokens.sequence(row * seq..(row + 1) * seq, factors));
    for (row, sums) in sums.collect::<Vec<_>>().into_iter().enumerate() {
        for (mark, sum) in sums.into_iter().enumerate() {
            marks[mark * rows + row] = sum as f32;
        }
    }
}

impl Tokens<'_> {
    /// Writes the factors of a sequence's tokens, and returns its marks.
    fn sequence(&self, own: Range<usize>, factors: &mut [f32]) -> [f64; 4] {
        let first = own.start;
        let counted = own.filter(|at| self.weights[*at] != 0.0);
        let (mut total, mut logarithms) = (0.0, 0.0);
        for at in counted.clone() {
            let weight = f64::from(self.weights[at]);
            total += weight;
            logarithms += weight * f64::from(self.log_ratio(at));
        }
        let shared = self.by_sequence.then_some((logarithms / total) as f32);
        let (mut sums, mut shared_slope) = ([0.0; 4], 0.0);
        factors.fill(0.0);
        for at in counted.clone() {
            let weight = f64::from(self.weights[at]);
            let log_ratio = shared.unwrap_or_else(|| self.log_ratio(at));
            let (loss, slope) = self.clipped(log_ratio.exp(), self.advantages[at]);
            let apart = self.reference.map_or(0.0, |of| of[at] + self.losses[at]);
            let kl = exp_beyond_line(apart);
            let pull = kl + apart;
            let of_token = [
                loss + times(self.beta, kl),
                kl,
                f32::from(slope.is_none()),
                1.0,
            ];
            for (sum, of_token) in sums.iter_mut().zip(of_token) {
                *sum += weight * f64::from(of_token);
            }
            let slope = slope.unwrap_or(0.0);
            shared_slope += weight * f64::from(slope);
            let own_slope = if self.by_sequence { 0.0 } else { slope };
            factors[at - first] = self.weights[at] * (own_slope + times(self.beta, pull));
        }
        if self.by_sequence {
            let of_weight = (shared_slope / total) as f32;
            counted.for_each(|at| factors[at - first] += self.weights[at] * of_weight);
        }
        sums
    }

    fn log_ratio(&self, at: usize) -> f32 {
        -self.losses[at] - self.old[at]
    }

    /// The loss of a ratio, and its derivative by minus the ratio's logarithm; none where the ratio is clipped.
    fn clipped(&self, ratio: f32, advantage: f32) -> (f32, Option<f32>) {
        let [lowest, highest] = self.clip;
        if advantage > 0.0 && ratio > highest {
            (-highest * advantage, None)
        } else if advantage < 0.0 && ratio < lowest {
            (-lowest * advantage, None)
        } else {
            let gain = times(advantage, ratio);
            (-gain, Some(gain))
        }
    }
}

/// `weight * x`, and 0 where the weight is 0, even if x is infinite.
fn times(weight: f32, x: f32) -> f32 {
    if weight == 0.0 { 0.0 } else { weight * x }
}

/// exp(x) - x - 1, exact where x is small: there it is a series.
fn exp_beyond_line(x: f32) -> f32 {
    if x.abs() > 0.5 {
        return x.exp() - 1.0 - x;
    }
    let term = |series: f32, n: u8| 1.0 + x * (1.0 / f32::from(n)) * series;
    0.5 * x * x * (3..=8).rev().fold(1.0, term)
}
