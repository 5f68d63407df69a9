//! Hooks that run during a pass, so that the optimizer can update weights meanwhile.

use kernels::KernelError;
use memory::{In, Layer};
use units::{Gradients, Weights};

/// Hooks that run while a micro-batch passes through the model. The default ones do nothing.
pub trait PassHooks {
    /// Runs just before a part's forward pass. The part's weights are on the device, and may still be written.
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

    /// Runs between the forward pass and the blocks' backward passes. The head's gradients are complete for this
    /// micro-batch.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn before_backward(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Runs only where gradients are released, once those of a part's unit are complete for the step. `loss` (`[1]`
    /// f32) is the step's sum of losses. The part's weights are on the device, and the step does not read them again.
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

    /// Whether to break the micro-batch off. It is asked before each part of the model, forward and backward; where
    /// gradients are released, only forward.
    fn is_stopped(&self) -> bool {
        false
    }
}

/// Hooks that do nothing.
pub struct NoHooks;

impl PassHooks for NoHooks {}
