//! A linear layer whose result is added to the residual stream.

use super::written;
use crate::stage::{Io, Stage};
use crate::{Activation, DropoutSite, Extent, Label, Linear, Pass, Result};
use kernels::Init;
use kernels::operation::{BiasDropoutAdd, DropoutScale};
use memory::{In, Out};

/// output `[b s, h]` = residual + multiplier dropout(input W^T + b): the output projection of attention, and of the feed-forward
/// layer.
pub struct ResidualProjection {
    /// The name in reports.
    pub name: &'static str,
    /// What is projected.
    pub input: Activation,
    /// The residual stream that the product is added to.
    pub residual: Activation,
    /// The sum.
    pub output: Activation,
    /// The projection.
    pub linear: Linear,
    /// What the product is multiplied by before it is added.
    pub multiplier: f32,
    /// Where the product is dropped before it is added.
    pub dropout: DropoutSite,
}

impl ResidualProjection {
    /// The residual stream between attention and the feed-forward layer.
    pub const X2: Activation = Activation::new("x2", "d_x", Label::ATTN_OUT);

    fn adds_product_itself(&self, pass: &Pass) -> bool {
        self.multiplier == 1.0 && pass.dropout(self.dropout).is_none()
    }

    /// The number of the first element of the sum: on a tile, its first token's.
    fn first(&self, pass: &Pass) -> usize {
        pass.first_token() * self.linear.outputs()
    }

    /// The product adds bias and residual itself. With dropout or a multiplier, one operation after the product adds the bias,
    /// drops, multiplies, and adds the residual.
    fn sum(&self, pass: &mut Pass, mut out: Option<Out>, x: In, residual: In) -> Result {
        if self.adds_product_itself(pass) {
            return self.linear.forward_onto(pass, out, x, residual);
        }
        let product = out.as_mut().map(Out::reborrow);
        self.linear.product(pass, product, x, Init::Overwrite)?;
        let Some(out) = out else {
            return Ok(());
        };
        let bias = self.linear.bias().map(|bias| pass.parameter(bias));
        Ok(pass.kernels().run(BiasDropoutAdd {
            out,
            bias,
            dropout: pass.dropout(self.dropout),
            first: self.first(pass),
            scale: self.multiplier,
            residual: Some(residual),
        })?)
    }
}

impl Stage for ResidualProjection {
    fn name(&self) -> &'static str {
        self.name
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![self.input, self.residual],
            writes: vec![(self.output, Extent::tokens(self.linear.outputs()))],
            backward_reads: self.linear.backward_reads(self.input),
        }
    }

    fn linears(&self) -> Vec<&Linear> {
        vec![&self.linear]
    }

    fn can_defer_gradients(&self) -> bool {
        self.linear.can_defer_gradients()
    }

    fn dropout(&self) -> Vec<DropoutSite> {
        [vec![self.dropout], self.linear.dropout()].concat()
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let (x, residual) = (pass.pull(self.input)?, pass.pull(self.residual)?);
        let mut out = pass.output(self.output)?;
        self.sum(pass, written(&mut out), x.view(), residual.view())?;
        pass.put(self.output, out);
        Ok(())
    }

    /// The gradient of the sum is also the residual's, and is filed unchanged.
    fn backward(&self, pass: &mut Pass) -> Result {
        let dsum = pass.gradient(self.output);
        let mut masked = None;
        if !self.adds_product_itself(pass) {
            let dx = masked.insert(pass.temporary("d_dropped", dsum.dims())?);
            pass.kernels().run(DropoutScale {
                out: dx.view_mut(),
                x: dsum.view(),
                dropout: pass.dropout(self.dropout),
                first: self.first(pass),
                scale: self.multiplier,
            })?;
        }
        match masked {
            Some(masked) => self.linear.backward_of(pass, self.input, masked),
            None => self.linear.backward(pass, self.input, dsum.view()),
        }?;
        pass.file_gradient(self.residual, dsum);
        Ok(())
    }
}
