//! The backward pass of a linear layer that leaves the gradients of its weights for later.

use super::Linear;
use crate::{Activation, ModelError, Pass};
use memory::Buffer;
use std::rc::Rc;

impl Linear {
    /// Whether the gradients of its weights can be computed later than that of its input: adapters need both, and codes of FP8 are
    /// made for both.
    pub(crate) fn gradients_can_wait(&self) -> bool {
        self.adapter.is_none() && self.fp8.is_none()
    }

    /// As [`Linear::backward_of`], but for the gradients of its weights, which wait with the input and `dy`.
    pub(super) fn backward_waiting(
        &self,
        pass: &mut Pass,
        input: Activation,
        dy: Buffer,
    ) -> Result<(), ModelError> {
        self.add_bias_gradients(pass, dy.view())?;
        let dy = Rc::new(dy);
        if self.reads_input_backward() {
            let x = pass.pull(input)?;
            for (weights, columns) in self.gradient_products(pass, dy.dims()[0]) {
                pass.leave_gradient(weights, columns, (dy.clone(), x.clone()));
            }
            pass.release(input, x);
        }
        let (mut dx, init) = pass.gradient_to_add(input)?;
        self.input_gradient(pass, dx.view_mut(), init, (dy.view(), None))?;
        pass.file_gradient(input, dx);
        Ok(())
    }
}
