//! Muon's momentum update, the sums of Newton-Schulz's iteration, and the update of the weights.

use super::dispatch::by_dtype;
use super::quantise::Codec;
use super::simd::{CHUNK, Real, vectorized};
use super::states::{
    Buffers, ByBlock, MomentAt, Random, Values, WeightsAt, in_blocks, moment_at, weights_at,
};
use super::{Shared, part};
use crate::operation::{Combine, DivideByNorm, Momentum, StepAlong};
use crate::quantise::SIGNED;
use rayon::prelude::*;

/// The operands of a momentum update, which tasks share.
struct MomentumStep<'a, T> {
    out: Shared<T>,
    momentum: MomentAt,
    gradients: Values<'a>,
    random: Random,
    gradient_scale: f32,
    decay: f32,
    nesterov: bool,
}

pub(super) fn momentum(op: Momentum) {
    by_dtype!(op.out.dtype(), momentum_of(op));
}

fn momentum_of<T: Real>(op: Momentum) {
    let gradient_scale = op.clip.slice::<f32>()[1];
    let elements = op.out.elements();
    let out = op.out.slice_mut::<T>();
    if !gradient_scale.is_finite() {
        return out.fill(T::narrow(0.0));
    }
    let step = MomentumStep {
        out: Shared(out.as_mut_ptr()),
        momentum: moment_at(op.momentum),
        gradients: Values::of(op.gradients),
        random: Random::new(op.key, op.first_index),
        gradient_scale,
        decay: op.decay,
        nesterov: op.nesterov,
    };
    in_blocks(&step, elements);
}

impl<T: Real> ByBlock for MomentumStep<'_, T> {
    #[inline(always)]
    fn update<C: Codec>(&self, start: usize, buffers: Buffers) {
        let ([gradients, momentum, ..], random) = buffers;
        self.gradients.read(start, gradients);
        self.momentum.read::<C>(&SIGNED, start, momentum);
        let (decay, rest) = (self.decay, 1.0 - self.decay);
        // SAFETY: the block is this task's, and lies in the output.
        let out = unsafe { part(self.out, start, gradients.len()) };
        let moving = momentum.iter_mut().zip(gradients).zip(out);
        for ((momentum, gradient), out) in moving {
            let gradient = *gradient * self.gradient_scale;
            *momentum = decay * *momentum + rest * gradient;
            *out = T::narrow(match self.nesterov {
                true => decay * *momentum + rest * gradient,
                false => *momentum,
            });
        }
        if let MomentAt::Bf16(_) = self.momentum {
            self.random.of_moments(start, random);
        }
        self.momentum
            .write::<C>(&SIGNED, start, momentum, (random, 0));
    }
}

pub(super) fn divide_by_norm(DivideByNorm { x, norm, eps }: DivideByNorm) {
    by_dtype!(
        x.dtype(),
        divide(x.slice_mut(), norm.slice::<f32>()[0], eps)
    );
}

fn divide<T: Real>(x: &mut [T], norm: f32, eps: f32) {
    let divisor = T::narrow(norm).widen().max(eps);
    x.par_chunks_mut(CHUNK).for_each(|x| {
        for x in x {
            *x = T::narrow(x.widen() / divisor);
        }
    });
}

pub(super) fn combine(op: Combine) {
    by_dtype!(
        op.out.dtype(),
        combine_of(op.out.slice_mut(), op.x.slice(), op.alpha, op.beta)
    );
}

fn combine_of<T: Real>(out: &mut [T], x: &[f32], alpha: f32, beta: f32) {
    let pairs = out.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK));
    pairs.for_each(|(out, x)| combine_chunk(out, x, alpha, beta));
}

vectorized! {
    fn combine_chunk<T: Real>(out: &mut [T], x: &[f32], alpha: f32, beta: f32) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = T::narrow(alpha * x + beta * out.widen());
        }
    }
}

/// The operands of an update of weights, which tasks share.
struct WeightsStep<'a> {
    weights: WeightsAt,
    direction: Values<'a>,
    random: Random,
    /// 1 - rate x weight decay.
    keep: f32,
    step_size: f32,
}

pub(super) fn step_along(op: StepAlong) {
    if !op.clip.slice::<f32>()[1].is_finite() {
        return;
    }
    let (rate, elements) = (op.rate.slice::<f32>()[0], op.parameters.elements());
    let step = WeightsStep {
        weights: weights_at(op.parameters, op.master),
        direction: Values::of(op.direction),
        random: Random::new(op.key, op.first_index),
        keep: 1.0 - rate * op.weight_decay,
        step_size: rate * op.scale,
    };
    in_blocks(&step, elements);
}

impl ByBlock for WeightsStep<'_> {
    #[inline(always)]
    fn update<C: Codec>(&self, start: usize, buffers: Buffers) {
        let ([weights, direction, ..], random) = buffers;
        self.weights.read(start, weights);
        self.direction.read(start, direction);
        for (weight, direction) in weights.iter_mut().zip(direction) {
            *weight = *weight * self.keep - self.step_size * *direction;
        }
        self.weights.write(start, weights, self.random, random);
    }
}
