//! A hook for the optimizer, which updates offloaded states while micro-batches pass.

use kernels::KernelError;
use memory::{Arena, Layer};

/// What else happens while a micro-batch passes through the model.
pub trait Beside {
    /// Just before a part of the model runs forward: its weights may still be written.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn before_forward(
        &mut self,
        part: Layer,
        parameters: &mut Arena,
        gradients: &Arena,
    ) -> Result<(), KernelError>;

    /// When the forward pass is done, the head's gradients are there, and the blocks go backward.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn before_backward(&mut self) -> Result<(), KernelError>;

    /// Whether the micro-batch is to be broken off: asked before each part of the model, in both directions.
    fn is_stopped(&self) -> bool {
        false
    }
}

/// Nothing else happens.
pub struct Nothing;

impl Beside for Nothing {
    fn before_forward(&mut self, _: Layer, _: &mut Arena, _: &Arena) -> Result<(), KernelError> {
        Ok(())
    }

    fn before_backward(&mut self) -> Result<(), KernelError> {
        Ok(())
    }
}
