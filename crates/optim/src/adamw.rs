//! AdamW (Loshchilov and Hutter 2019).

use crate::moment::Moment;
use crate::rule::{ByRange, Keeps, StepNumbers, Update, UpdateQueue};
use kernels::Result;
use kernels::quantise::{SIGNED, UNSIGNED};

/// AdamW's numbers that do not change during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
        }
    }
}

/// The averages of gradients and of squared gradients.
static MOMENTS: [Moment; 2] = [
    Moment {
        plain: "first_moment",
        codes: "first_moment.codes",
        absmax: "first_moment.absmax",
        map: &SIGNED,
    },
    Moment {
        plain: "second_moment",
        codes: "second_moment.codes",
        absmax: "second_moment.absmax",
        map: &UNSIGNED,
    },
];

impl Keeps for AdamW {
    fn moments(&self) -> &'static [Moment] {
        &MOMENTS
    }

    fn rate_count(&self) -> usize {
        3
    }

    /// The learning rate and the bias corrections.
    fn rates(&self, step: &StepNumbers) -> Vec<f32> {
        let update = step.update as i32;
        let rates = [
            step.learning_rate,
            1.0 / (1.0 - self.beta1.powi(update)),
            1.0 / (1.0 - self.beta2.powi(update)).sqrt(),
        ];
        rates.map(|rate| rate as f32).to_vec()
    }
}

impl ByRange for AdamW {
    fn update(&self, on: &UpdateQueue, update: Update) -> Result {
        let Ok([first_moment, second_moment]) = <[_; 2]>::try_from(update.moments) else {
            unreachable!("there are as many states as the rule says")
        };
        on.run(kernels::AdamW {
            parameters: update.weights,
            master: update.master,
            first_moment,
            second_moment,
            gradients: update.gradients,
            rates: update.rates,
            clip: update.clip,
            key: update.key,
            first_index: update.first_index,
            beta1: self.beta1 as f32,
            beta2: self.beta2 as f32,
            eps: self.eps as f32,
            weight_decay: update.weight_decay,
        })
    }
}

/// AdamW at a multiple of the learning rate.
pub(crate) struct AdamWAt {
    pub(crate) adamw: AdamW,
    pub(crate) ratio: f64,
}

impl Keeps for AdamWAt {
    fn moments(&self) -> &'static [Moment] {
        self.adamw.moments()
    }

    fn rate_count(&self) -> usize {
        self.adamw.rate_count()
    }

    fn rates(&self, step: &StepNumbers) -> Vec<f32> {
        self.adamw.rates(&StepNumbers {
            learning_rate: step.learning_rate * self.ratio,
            ..*step
        })
    }
}

impl ByRange for AdamWAt {
    fn update(&self, on: &UpdateQueue, update: Update) -> Result {
        self.adamw.update(on, update)
    }
}
