//! The numbers of an update that all calls of a step share.

use crate::rule::{Hyperparameters, ParameterGroup};
use crate::update::StepNumbers;
use kernels::{Kernels, Result};
use memory::{Buffer, Category, DType, In, Memory, OutOfMemory};

/// The numbers that all updates of a step share, on the device.
pub(crate) struct Numbers {
    pub(crate) weight_decay: f64,
    /// The global norm that gradients are scaled down to.
    pub(crate) clip_norm: f64,
    /// f32: the rates of each group.
    rates: Vec<Buffer>,
    /// `[2]` f32: gradient norm and clipping factor of the step.
    pub(crate) clip: Buffer,
    /// `[2]` u32: key of the step's random numbers.
    pub(crate) key: Buffer,
}

impl Numbers {
    /// Leases room for the numbers of a step.
    pub(crate) fn lease(
        memory: &Memory,
        hyperparameters: &Hyperparameters,
        groups: &[ParameterGroup],
    ) -> Result<Numbers, OutOfMemory> {
        let lease = |name, elements: usize, dtype| {
            memory.lease_persistent(Category::OptimizerState, name, [elements], dtype)
        };
        // How many there are does not depend on the step.
        let rates = groups.iter().map(|group| {
            let count = group.rule.rates(&StepNumbers::default()).len();
            lease("rates", count, DType::F32)
        });
        Ok(Numbers {
            weight_decay: hyperparameters.weight_decay,
            clip_norm: hyperparameters.clip_norm,
            rates: rates.collect::<Result<_, OutOfMemory>>()?,
            clip: lease("clip", 2, DType::F32)?,
            key: lease("key", 2, DType::U32)?,
        })
    }

    /// Uploads the numbers that change from step to step.
    pub(crate) fn upload(
        &mut self,
        kernels: &Kernels,
        groups: &[ParameterGroup],
        numbers: StepNumbers,
    ) -> Result {
        for (group, rates) in groups.iter().zip(&mut self.rates) {
            let values = group.rule.rates(&numbers);
            kernels.upload(rates.view_mut(), bytemuck::cast_slice(&values))?;
        }
        let key = kernels::random::key(numbers.seed, numbers.step as u64, ROUNDING);
        let key = [key as u32, (key >> 32) as u32];
        kernels.upload(self.key.view_mut(), bytemuck::cast_slice(&key))
    }

    /// The rates of a group, f32.
    pub(crate) fn rates(&self, group: usize) -> In<'_> {
        self.rates[group].view()
    }
}

/// The stream of random numbers for stochastic rounding of states and weights.
const ROUNDING: u32 = 1;
