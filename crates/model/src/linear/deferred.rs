//! The backward pass of a linear layer that defers the gradients of its weights.

use super::Linear;
use crate::{Activation, Pass, Result};
use memory::Buffer;
use std::rc::Rc;

impl Linear {
    /// Whether the gradients of its weights can be computed later than that of its input: adapters need both, and codes of FP8 are
    /// made for both.
    pub(crate) fn can_defer_gradients(&self) -> bool {
        self.adapter.is_none() && self.fp8.is_none()
    }

    /// Whether this pass defers the gradients of its weights, if it has any.
    pub(super) fn defers(&self, pass: &Pass) -> bool {
        pass.defers_gradients() && self.reads_input_backward()
    }

    /// As [`Linear::backward_of`], but defers the gradients of its weights: input and `dy` are kept until then.
    pub(super) fn backward_deferring(
        &self,
        pass: &mut Pass,
        input: Activation,
        dy: Buffer,
    ) -> Result {
        self.add_bias_gradients(pass, dy.view())?;
        let dy = Rc::new(dy);
        let x = pass.pull(input)?;
        for (weights, columns) in self.gradient_products(pass) {
            pass.defer_gradient(weights, columns, (dy.clone(), x.clone()));
        }
        pass.release(input, x);
        let (mut dx, init) = pass.gradient_to_add(input)?;
        self.input_gradient(pass, dx.view_mut(), init, (dy.view(), None))?;
        pass.file_gradient(input, dx);
        Ok(())
    }
}
