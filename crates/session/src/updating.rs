//! The optimizer beside the passes of a step.

use kernels::{KernelError, Kernels, Traffic};
use memory::{Arena, Layer, Memory, Phase};
use model::Beside;
use optim::AdamW;

/// What crosses for the optimizer while a step passes through the model.
#[derive(Clone, Copy, Default)]
pub(crate) struct UpdateTraffic {
    /// What the update of the step before moves.
    pub(crate) before: Traffic,
    /// What this step's update fetches ahead.
    pub(crate) prefetched: Traffic,
}

impl UpdateTraffic {
    pub(crate) fn total(&self) -> Traffic {
        self.before.plus(self.prefetched)
    }
}

/// The optimizer beside the passes of a step: updates what the step before has left, and fetches what this one needs.
pub(crate) struct Updating<'a> {
    pub(crate) kernels: &'a dyn Kernels,
    pub(crate) memory: &'a Memory,
    pub(crate) optimizer: &'a mut AdamW,
    /// Whether offloaded states are updated in forward passes at all.
    pub(crate) in_forward: bool,
    pub(crate) is_first_micro_batch: bool,
    pub(crate) is_last_micro_batch: bool,
    /// Whether the step is to be broken off.
    pub(crate) stop: &'a dyn Fn() -> bool,
    pub(crate) traffic: &'a mut UpdateTraffic,
}

impl Beside for Updating<'_> {
    fn before_forward(
        &mut self,
        layer: Layer,
        parameters: &mut Arena,
        gradients: &Arena,
    ) -> Result<(), KernelError> {
        if !(self.in_forward && self.is_first_micro_batch) {
            return Ok(());
        }
        // Entered in the first step too, though nothing is pending then, so that all steps have the same peaks.
        let _place = self.memory.enter(Phase::Optimizer, layer);
        let before = self.kernels.traffic();
        self.optimizer
            .update_part(self.kernels, parameters, gradients, layer)?;
        let crossed = self.kernels.traffic().since(before);
        self.traffic.before = self.traffic.before.plus(crossed);
        Ok(())
    }

    fn before_backward(&mut self) -> Result<(), KernelError> {
        if self.is_last_micro_batch {
            let before = self.kernels.traffic();
            self.optimizer.prefetch(self.kernels)?;
            let crossed = self.kernels.traffic().since(before);
            self.traffic.prefetched = self.traffic.prefetched.plus(crossed);
        }
        Ok(())
    }

    fn is_stopped(&self) -> bool {
        (self.stop)()
    }
}
