//! The activation function of a feed-forward layer without a gate: GELU (Hendrycks and Gimpel 2016), by its tanh form.

use super::Swiglu;
use crate::stage::{Io, Stage};
use crate::{Activation, Extent, Label, ModelError, Pass};
use kernels::operation::{self, GeluBackward};

/// act `[b s, f]` = gelu(fc).
pub struct Gelu {
    /// Width of both.
    pub width: usize,
}

impl Gelu {
    /// What the first product of the feed-forward layer writes.
    pub const FC: Activation = Activation::new("fc", "d_fc", Label::MLP);
    /// gelu(fc).
    pub const ACT: Activation = Swiglu::ACT;
}

impl Stage for Gelu {
    fn name(&self) -> &'static str {
        "mlp_act"
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![Gelu::FC],
            writes: vec![(Gelu::ACT, Extent::tokens(self.width))],
            backward_reads: vec![Gelu::FC],
        }
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let fc = pass.pull(Gelu::FC)?;
        let mut act = pass.output(Gelu::ACT)?;
        if let Some(act) = &mut act {
            pass.kernels().run(operation::Gelu {
                act: act.view_mut(),
                x: fc.view(),
            })?;
        }
        pass.put(Gelu::ACT, act);
        Ok(())
    }

    /// The gradient takes the place of fc.
    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let dact = pass.gradient(Gelu::ACT);
        let mut fc = pass.take(Gelu::FC)?;
        pass.kernels().run(GeluBackward {
            x: fc.view_mut(),
            dact: dact.view(),
        })?;
        pass.file_gradient(Gelu::FC, fc);
        Ok(())
    }
}
