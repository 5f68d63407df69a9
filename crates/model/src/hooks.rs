//! Hooks that run while micro-batches pass: by them the optimizer updates beside a pass.

use kernels::KernelError;
use memory::{In, Layer};
use units::{Gradients, Weights};

/// Hooks that run while a micro-batch passes through the model. By default they do nothing.
pub trait PassHooks {
    /// Just before a part of the model runs forward: its weights, which are on the device, may still be written.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn before_forward(
        &mut self,
        _part: Layer,
        _weights: &mut Weights,
        _gradients: &Gradients,
    ) -> Result<(), KernelError> {
        Ok(())
    }

    /// When the forward pass is done, the head's gradients are there, and the blocks go backward.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn before_backward(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Called only where gradients are released, once those of a part's unit are complete for the step. `loss` (`[1]` f32) is
    /// the step's sum of losses. The part's weights are on the device, and not read again in the step.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn after_backward(
        &mut self,
        _part: Layer,
        _weights: &mut Weights,
        _gradients: &mut Gradients,
        _loss: In,
    ) -> Result<(), KernelError> {
        Ok(())
    }

    /// Whether the micro-batch is to be broken off: asked before each part of the model, in both directions; where gradients
    /// are released, forward alone.
    fn is_stopped(&self) -> bool {
        false
    }
}

/// Hooks that do nothing.
pub struct NoHooks;

impl PassHooks for NoHooks {}
