//! AdamW (Loshchilov and Hutter 2019).

use crate::moment::{Moment, moment};
use crate::update::{StepNumbers, Update, UpdateQueue};
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
pub(crate) static MOMENTS: [Moment; 2] = [
    moment!("first_moment", SIGNED),
    moment!("second_moment", UNSIGNED),
];

impl AdamW {
    /// The learning rate and the bias corrections.
    pub(crate) fn rates(&self, learning_rate: f64, step: &StepNumbers) -> [f64; 3] {
        let update = step.update as i32;
        [
            learning_rate,
            1.0 / (1.0 - self.beta1.powi(update)),
            1.0 / (1.0 - self.beta2.powi(update)).sqrt(),
        ]
    }

    /// Enqueues the update of a range. If the clipping factor is not finite, nothing changes.
    pub(crate) fn update(&self, on: &UpdateQueue, update: Update) -> Result {
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
