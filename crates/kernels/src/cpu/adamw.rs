//! AdamW on ranges, for every format of its states.
//!
//! A block of 256 elements is read from its states' format into f32, updated and written back. The f32 values stay in
//! the first-level cache. All arithmetic is f32.

use super::quantise::Codec;
use super::states::{
    Buffers, ByBlock, MomentAt, Random, Values, WeightsAt, in_blocks, moment_at, weights_at,
};
use crate::AdamW;
use crate::quantise::{SIGNED, UNSIGNED};

/// The numbers of one update.
#[derive(Clone, Copy)]
struct Rates {
    gradient_scale: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    /// 1 - learning rate x weight decay.
    keep: f32,
    /// Learning rate / (1 - beta1^t).
    step_size: f32,
    /// 1 / sqrt(1 - beta2^t).
    root_scale: f32,
}

impl Rates {
    /// Reads the step's rates; none if the step is to be skipped.
    fn read(update: &AdamW) -> Option<Rates> {
        let gradient_scale = update.clip.slice::<f32>()[1];
        let given = update.rates.slice::<f32>();
        gradient_scale.is_finite().then(|| Rates {
            gradient_scale,
            beta1: update.beta1,
            beta2: update.beta2,
            eps: update.eps,
            keep: 1.0 - given[0] * update.weight_decay,
            step_size: given[0] * given[1],
            root_scale: given[2],
        })
    }
}

/// The operands of an update, which tasks share.
struct Update<'a> {
    weights: WeightsAt,
    first: MomentAt,
    second: MomentAt,
    gradients: Values<'a>,
    random: Random,
    rates: Rates,
}

pub(super) fn adamw(update: AdamW) {
    let Some(rates) = Rates::read(&update) else {
        return;
    };
    let elements = update.parameters.elements();
    let shared = Update {
        weights: weights_at(update.parameters, update.master),
        first: moment_at(update.first_moment),
        second: moment_at(update.second_moment),
        gradients: Values::of(update.gradients),
        random: Random::new(update.key, update.first_index),
        rates,
    };
    in_blocks(&shared, elements);
}

impl ByBlock for Update<'_> {
    #[inline(always)]
    fn update<C: Codec>(&self, start: usize, buffers: Buffers) {
        let ([weights, first, second, gradients], random) = buffers;
        self.weights.read(start, weights);
        self.first.read::<C>(&SIGNED, start, first);
        self.second.read::<C>(&UNSIGNED, start, second);
        self.gradients.read(start, gradients);
        step(weights, first, second, gradients, &self.rates);
        self.weights.write(start, weights, self.random, random);
        if let MomentAt::Bf16(_) = self.first {
            self.random.of_moments(start, random);
        }
        self.first.write::<C>(&SIGNED, start, first, (random, 0));
        self.second
            .write::<C>(&UNSIGNED, start, second, (random, 16));
    }
}

#[inline(always)]
fn step(
    weights: &mut [f32],
    first: &mut [f32],
    second: &mut [f32],
    gradients: &[f32],
    rates: &Rates,
) {
    let states = first.iter_mut().zip(second).zip(gradients);
    for (weight, ((m, v), gradient)) in weights.iter_mut().zip(states) {
        let gradient = gradient * rates.gradient_scale;
        *m = rates.beta1 * *m + (1.0 - rates.beta1) * gradient;
        *v = rates.beta2 * *v + (1.0 - rates.beta2) * gradient * gradient;
        let root = v.sqrt() * rates.root_scale + rates.eps;
        *weight = *weight * rates.keep - rates.step_size * *m / root;
    }
}
