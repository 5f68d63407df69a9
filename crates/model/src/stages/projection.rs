//! Linear layers that read one activation and write one.

use super::written;
use crate::activation::Dimension;
use crate::stage::{Io, Stage};
use crate::{Activation, Extent, Linear, Pass, Result};

/// output `[b s, f]` = input W^T + b: gate and up side by side, the first product of a feed-forward layer without a gate,
/// or the logits of a router.
pub struct Projection {
    /// The name in reports.
    pub name: &'static str,
    /// What is projected.
    pub input: Activation,
    /// The activation that it writes.
    pub output: Activation,
    /// The linear layer.
    pub linear: Linear,
    /// The output is f32 whatever the model computes in, as the logits of a router are.
    pub in_f32: bool,
}

impl Stage for Projection {
    fn name(&self) -> &'static str {
        self.name
    }

    fn io(&self) -> Io {
        let extent = match self.in_f32 {
            false => Extent::tokens(self.linear.outputs()),
            true => Extent::of_f32(&[Dimension::Tokens, Dimension::Fixed(self.linear.outputs())]),
        };
        Io {
            reads: vec![self.input],
            writes: vec![(self.output, extent)],
            backward_reads: self.linear.backward_reads(self.input),
        }
    }

    fn linears(&self) -> Vec<&Linear> {
        vec![&self.linear]
    }

    fn can_defer_gradients(&self) -> bool {
        self.linear.can_defer_gradients()
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let x = pass.pull(self.input)?;
        let mut y = pass.output(self.output)?;
        self.linear.forward(pass, written(&mut y), x.view())?;
        pass.put(self.output, y);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let dy = pass.gradient(self.output);
        self.linear.backward_of(pass, self.input, dy)
    }
}
