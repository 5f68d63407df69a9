//! AdamW with f32 moments, on f32 weights or on bf16 weights with an f32 master.

use super::simd::{CHUNK, vectorized};
use crate::AdamW;
use half::bf16;
use rayon::prelude::*;

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

pub(super) fn adamw(update: AdamW) {
    let gradient_scale = update.clip.slice::<f32>()[1];
    if !gradient_scale.is_finite() {
        return;
    }
    let given = update.rates.slice::<f32>();
    let rates = Rates {
        gradient_scale,
        beta1: update.beta1,
        beta2: update.beta2,
        eps: update.eps,
        keep: 1.0 - given[0] * update.weight_decay,
        step_size: given[0] * given[1],
        root_scale: given[2],
    };
    let first = update.first_moment.slice_mut::<f32>().par_chunks_mut(CHUNK);
    let second = update
        .second_moment
        .slice_mut::<f32>()
        .par_chunks_mut(CHUNK);
    let states = first
        .zip(second)
        .zip(update.gradients.slice::<f32>().par_chunks(CHUNK));
    match update.master {
        None => {
            let weights = update.parameters.slice_mut::<f32>().par_chunks_mut(CHUNK);
            weights
                .zip(states)
                .for_each(|(weights, ((first, second), gradients))| {
                    step(weights, first, second, gradients, rates);
                });
        }
        Some(master) => {
            let master = master.slice_mut::<f32>().par_chunks_mut(CHUNK);
            let weights = update.parameters.slice_mut::<bf16>().par_chunks_mut(CHUNK);
            weights.zip(master).zip(states).for_each(
                |((weights, master), ((first, second), gradients))| {
                    step(master, first, second, gradients, rates);
                    narrow(weights, master);
                },
            );
        }
    }
}

vectorized! {
    fn step(weights: &mut [f32], first: &mut [f32], second: &mut [f32], gradients: &[f32], rates: Rates) {
        let states = first.iter_mut().zip(second).zip(gradients);
        for (weight, ((m, v), gradient)) in weights.iter_mut().zip(states) {
            let gradient = gradient * rates.gradient_scale;
            *m = rates.beta1 * *m + (1.0 - rates.beta1) * gradient;
            *v = rates.beta2 * *v + (1.0 - rates.beta2) * gradient * gradient;
            let root = v.sqrt() * rates.root_scale + rates.eps;
            *weight = *weight * rates.keep - rates.step_size * *m / root;
        }
    }

    fn narrow(weights: &mut [bf16], master: &[f32]) {
        for (weight, master) in weights.iter_mut().zip(master) {
            *weight = super::simd::Real::narrow(*master);
        }
    }
}
