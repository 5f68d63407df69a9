//! Muon's momentum update, the sums of Newton-Schulz's iteration, and the update of the weights.

use super::Shared;
use super::dispatch::by_dtype;
use super::quantise::Codec;
use super::simd::{CHUNK, Real, vectorized};
use super::states::{
    ByBlock, MomentAt, Random, Values, WeightsAt, in_blocks, moment_at, part, weights_at,
};
use crate::operation::{Combine, DivideByNorm, Momentum, StepAlong};
use crate::quantise::{BLOCK, SIGNED};
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

/// Two blocks in f32, and random numbers for one.
pub(super) struct Block {
    one: [f32; BLOCK],
    other: [f32; BLOCK],
    random: [u32; BLOCK],
}

impl Default for Block {
    fn default() -> Block {
        Block {
            one: [0.0; BLOCK],
            other: [0.0; BLOCK],
            random: [0; BLOCK],
        }
    }
}

pub(super) fn momentum(operation: Momentum) {
    by_dtype!(operation.out.dtype(), momentum_of(operation));
}

fn momentum_of<T: Real>(operation: Momentum) {
    let gradient_scale = operation.clip.slice::<f32>()[1];
    let elements = operation.out.elements();
    let out = operation.out.slice_mut::<T>();
    if !gradient_scale.is_finite() {
        return out.fill(T::narrow(0.0));
    }
    let step = MomentumStep {
        out: Shared(out.as_mut_ptr()),
        momentum: moment_at(operation.momentum),
        gradients: Values::of(operation.gradients),
        random: Random::new(operation.key, operation.first_index),
        gradient_scale,
        decay: operation.decay,
        nesterov: operation.nesterov,
    };
    in_blocks(&step, elements);
}

impl<T: Real> ByBlock for MomentumStep<'_, T> {
    type Buffers = Block;

    #[inline(always)]
    fn update<C: Codec>(&self, start: usize, elements: usize, block: &mut Block) {
        let (gradients, momentum) = (&mut block.one[..elements], &mut block.other[..elements]);
        let random = &mut block.random[..elements];
        self.gradients.read(start, gradients);
        self.momentum.read::<C>(&SIGNED, start, momentum);
        let (decay, rest) = (self.decay, 1.0 - self.decay);
        // SAFETY: the block is this task's, and lies in the output.
        let out = unsafe { part(self.out, start, elements) };
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

pub(super) fn combine(operation: Combine) {
    let Combine {
        out,
        x,
        alpha,
        beta,
    } = operation;
    by_dtype!(
        out.dtype(),
        combine_of(out.slice_mut(), x.slice(), alpha, beta)
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

pub(super) fn step_along(operation: StepAlong) {
    if !operation.clip.slice::<f32>()[1].is_finite() {
        return;
    }
    let (rate, elements) = (
        operation.rate.slice::<f32>()[0],
        operation.parameters.elements(),
    );
    let step = WeightsStep {
        weights: weights_at(operation.parameters, operation.master),
        direction: Values::of(operation.direction),
        random: Random::new(operation.key, operation.first_index),
        keep: 1.0 - rate * operation.weight_decay,
        step_size: rate * operation.scale,
    };
    in_blocks(&step, elements);
}

impl ByBlock for WeightsStep<'_> {
    type Buffers = Block;

    #[inline(always)]
    fn update<C: Codec>(&self, start: usize, elements: usize, block: &mut Block) {
        let (weights, direction) = (&mut block.one[..elements], &mut block.other[..elements]);
        self.weights.read(start, weights);
        self.direction.read(start, direction);
        for (weight, direction) in weights.iter_mut().zip(direction) {
            *weight = *weight * self.keep - self.step_size * *direction;
        }
        let random = &mut block.random[..elements];
        self.weights.write(start, weights, self.random, random);
    }
}
