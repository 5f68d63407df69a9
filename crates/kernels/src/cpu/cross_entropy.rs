//! Cross-entropy with its gradient in place of the logits, and the cap of logits.

use super::dispatch::by_dtype;
use super::simd::{CHUNK, Real, exp, lane_max, lane_sum, tanh, vectorized};
use crate::operation::{CrossEntropy, SoftCap};
use rayon::prelude::*;

/// A cap on logits, or none. Cross-entropy applies it before the softmax.
trait Cap: Copy + Sync {
    /// Whether it changes logits at all.
    const CHANGES: bool;

    /// The capped logit.
    fn of(self, logit: f32) -> f32;

    /// The derivative of the capped logit with respect to the logit.
    fn slope(self, capped: f32) -> f32;
}

#[derive(Clone, Copy)]
struct Uncapped;

impl Cap for Uncapped {
    const CHANGES: bool = false;

    #[inline(always)]
    fn of(self, logit: f32) -> f32 {
        logit
    }

    #[inline(always)]
    fn slope(self, _capped: f32) -> f32 {
        1.0
    }
}

/// cap tanh(logit / cap).
#[derive(Clone, Copy)]
struct Capped(f32);

impl Cap for Capped {
    const CHANGES: bool = true;

    #[inline(always)]
    fn of(self, logit: f32) -> f32 {
        self.0 * tanh(logit / self.0)
    }

    #[inline(always)]
    fn slope(self, capped: f32) -> f32 {
        let share = capped / self.0;
        1.0 - share * share
    }
}

pub(super) fn cross_entropy(op: CrossEntropy) {
    let dtype = op.logits.dtype();
    match op.cap {
        None => by_dtype!(dtype, cross_entropy_of(op, Uncapped)),
        Some(cap) => by_dtype!(dtype, cross_entropy_of(op, Capped(cap))),
    }
}

fn cross_entropy_of<T: Real>(op: CrossEntropy, cap: impl Cap) {
    let scales = op.scale.map_or(&[1.0][..], |scale| scale.slice::<f32>());
    let scale_of = |row: usize| {
        if let [one] = scales {
            *one
        } else {
            scales[row]
        }
    };
    let (losses, logits) = (op.losses.slice_mut::<f32>(), op.logits.slice_mut::<T>());
    let targets = op.targets.slice::<i32>();
    let vocabulary = logits.len() / losses.len().max(1);
    if vocabulary == 0 {
        return;
    }
    let rows = logits
        .par_chunks_mut(vocabulary)
        .zip(losses.par_iter_mut())
        .zip(targets)
        .enumerate();
    rows.for_each(
        |(at, ((logits, loss), target))| match usize::try_from(*target) {
            Ok(target) => *loss = row(logits, target, scale_of(at), cap),
            Err(_) => {
                *loss = 0.0;
                logits.fill(T::narrow(0.0));
            }
        },
    );
}

pub(super) fn soft_cap(SoftCap { x, cap }: SoftCap) {
    by_dtype!(x.dtype(), soft_cap_of(x.slice_mut(), cap));
}

fn soft_cap_of<T: Real>(x: &mut [T], cap: f32) {
    x.par_chunks_mut(CHUNK)
        .for_each(|x| cap_all(x, Capped(cap)));
}

vectorized! {
    /// Returns the loss of one token and replaces its logits by their gradient.
    fn row<T: Real, C: Cap>(logits: &mut [T], target: usize, scale: f32, cap: C) -> f32 {
        let (largest, of_target) = (cap.of(lane_max(logits)), cap.of(logits[target].widen()));
        let at_target = of_target - largest;
        // f32 has room for the exponentials in place; bf16 would round them before they are scaled, and the slope of a cap
        // needs the logits.
        let in_place = !(T::WIDEN || C::CHANGES);
        let sum = if in_place {
            logits.iter_mut().for_each(|logit| *logit = T::narrow(exp(logit.widen() - largest)));
            lane_sum([&*logits], |[exponential]| exponential)
        } else {
            lane_sum([&*logits], |[logit]| exp(cap.of(logit) - largest))
        };
        let factor = scale / sum;
        for logit in logits.iter_mut() {
            let value = logit.widen();
            *logit = T::narrow(if in_place {
                value * factor
            } else {
                let capped = cap.of(value);
                exp(capped - largest) * factor * cap.slope(capped)
            });
        }
        logits[target] = T::narrow((exp(at_target) * factor - scale) * cap.slope(of_target));
        sum.ln() - at_target
    }

    fn cap_all<T: Real, C: Cap>(x: &mut [T], cap: C) {
        for x in x {
            *x = T::narrow(cap.of(x.widen()));
        }
    }
}
