//! The optimizer beside the passes of a step.

use crate::outcome::InFlight;
use kernels::{Account, KernelError, Kernels};
use memory::{In, Layer, Memory, Phase};
use model::PassHooks;
use optim::Optimizer;
use units::{Gradients, Weights};

/// The optimizer beside the passes of a step: makes the previous step's update, and fetches what this step's needs.
pub(crate) struct UpdateInPasses<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) memory: &'a Memory,
    pub(crate) optimizer: &'a mut Optimizer,
    /// Whether forward passes update what is offloaded.
    pub(crate) in_forward: bool,
    pub(crate) is_first_micro_batch: bool,
    pub(crate) is_last_micro_batch: bool,
    /// Whether parts are updated as soon as their gradients are complete.
    pub(crate) is_released: bool,
    /// Reports whether to interrupt the step.
    pub(crate) stop: &'a dyn Fn() -> bool,
    /// The step before, which the device may still be at.
    pub(crate) before: Option<&'a InFlight>,
}

impl PassHooks for UpdateInPasses<'_> {
    fn before_forward(
        &mut self,
        layer: Layer,
        weights: &mut Weights,
        gradients: &Gradients,
    ) -> Result<(), KernelError> {
        if !(self.in_forward && self.is_first_micro_batch) {
            return Ok(());
        }
        // Entered in the first step too, although nothing is pending, so that all steps have the same peaks.
        let _place = self.memory.enter(Phase::Optimizer, layer);
        let _account = self.kernels.count_to_step_before(Account::Update);
        self.optimizer
            .update_part(self.kernels, weights, gradients, layer)
    }

    fn before_backward(&mut self) -> Result<(), KernelError> {
        // If gradients are released, this was done before the forward pass.
        if self.is_last_micro_batch && !self.is_released {
            let _account = self.kernels.count_to(Account::Update);
            self.optimizer.prefetch(self.kernels)?;
        }
        Ok(())
    }

    fn after_backward(
        &mut self,
        part: Layer,
        weights: &mut Weights,
        gradients: &mut Gradients,
        loss: In,
    ) -> Result<(), KernelError> {
        let _place = self.memory.enter(Phase::Optimizer, part);
        let _account = self.kernels.count_to(Account::Update);
        self.optimizer
            .update_released(self.kernels, weights, gradients, part, loss)
    }

    fn is_stopped(&self) -> bool {
        // Asked before each block.
        if let Some(before) = self.before {
            before.note_if_made(self.kernels);
        }
        (self.stop)()
    }
}
