//! The numbers of an update, which all calls of a step share.

use crate::form::StateViews;
use crate::segment::Segment;
use kernels::{KernelError, Kernels};
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};

/// The numbers of AdamW that stay the same over a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyperparameters {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of matrices; vectors have none.
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm; infinite: never.
    pub clip_norm: f64,
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepNumbers {
    /// The step, from 1: with `seed` the key of the step's random numbers.
    pub step: usize,
    /// The update, from 1: unlike `step` it does not count skipped steps. Decides bias corrections.
    pub update: usize,
    /// The learning rate.
    pub learning_rate: f64,
    /// The run's seed.
    pub seed: u64,
}

/// What all updates of a step share, on the device.
pub(crate) struct Numbers {
    hyperparameters: Hyperparameters,
    /// `[3]` f32: learning rate and bias corrections of the step.
    rates: Buffer,
    /// `[2]` f32: gradient norm and clipping factor of the step.
    pub(crate) clip: Buffer,
    /// `[2]` u32: key of the step's random numbers.
    key: Buffer,
}

/// What one update reads and writes, on the device.
pub(crate) struct Operands<'a> {
    pub(crate) weights: Out<'a>,
    pub(crate) gradients: In<'a>,
    pub(crate) states: StateViews<'a>,
    /// `[2]` f32: the norm and the factor on gradients.
    pub(crate) clip: In<'a>,
}

impl Numbers {
    /// Leases room for the numbers of a step.
    pub(crate) fn lease(
        memory: &Memory,
        hyperparameters: Hyperparameters,
    ) -> Result<Numbers, OutOfMemory> {
        let lease = |name, elements: usize, dtype| {
            memory.lease_persistent(Category::OptimizerState, name, [elements], dtype)
        };
        Ok(Numbers {
            hyperparameters,
            rates: lease("rates", 3, DType::F32)?,
            clip: lease("clip", 2, DType::F32)?,
            key: lease("key", 2, DType::U32)?,
        })
    }

    /// The global norm to which gradients are scaled down.
    pub(crate) fn clip_norm(&self) -> f64 {
        self.hyperparameters.clip_norm
    }

    /// Sends what changes from step to step.
    pub(crate) fn upload(
        &mut self,
        kernels: &dyn Kernels,
        numbers: StepNumbers,
    ) -> Result<(), KernelError> {
        let Hyperparameters { beta1, beta2, .. } = self.hyperparameters;
        let update = numbers.update as i32;
        let rates = [
            numbers.learning_rate,
            1.0 / (1.0 - beta1.powi(update)),
            1.0 / (1.0 - beta2.powi(update)).sqrt(),
        ];
        let rates = rates.map(|rate| rate as f32);
        let key = kernels::random::key(numbers.seed, numbers.step as u64, ROUNDING);
        let key = [key as u32, (key >> 32) as u32];
        kernels.upload(self.rates.view_mut(), bytemuck::cast_slice(&rates))?;
        kernels.upload(self.key.view_mut(), bytemuck::cast_slice(&key))
    }

    /// The update of a segment.
    pub(crate) fn update<'a>(
        &'a self,
        Segment { number, decays, .. }: &Segment,
        operands: Operands<'a>,
    ) -> kernels::AdamW<'a> {
        let Hyperparameters {
            beta1,
            beta2,
            eps,
            weight_decay,
            ..
        } = self.hyperparameters;
        let states = operands.states;
        kernels::AdamW {
            parameters: operands.weights,
            master: states.master,
            first_moment: states.first_moment,
            second_moment: states.second_moment,
            gradients: operands.gradients,
            rates: self.rates.view(),
            clip: operands.clip,
            key: self.key.view(),
            first_index: *number as u64,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            eps: eps as f32,
            weight_decay: if *decays { weight_decay as f32 } else { 0.0 },
        }
    }
}

/// The stream of random numbers that states and weights are rounded with.
const ROUNDING: u32 = 1;
