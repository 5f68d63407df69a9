//! The gated activation function of the feed-forward layer (Shazeer 2020).

use crate::stage::{Io, Stage};
use crate::{Activation, Extent, Label, ModelError, Pass};
use kernels::operation::{self, SwigluBackward};

/// act `[b s, f]` = silu(gate) up.
pub struct Swiglu {
    /// Width of the gate, of what it lets through, and of act.
    pub width: usize,
}

impl Swiglu {
    /// `[b s, 2 f]`: the gate, and beside it what it lets through.
    pub const GATE_UP: Activation = Activation::new("gate_up", "d_gate_up", Label::MLP);
    /// silu(gate) up.
    pub const ACT: Activation = Activation::new("act", "d_act", Label::MLP_ACT);
}

impl Stage for Swiglu {
    fn name(&self) -> &'static str {
        "mlp_act"
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![Swiglu::GATE_UP],
            writes: vec![(Swiglu::ACT, Extent::tokens(self.width))],
            backward_reads: vec![Swiglu::GATE_UP],
        }
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let gate_up = pass.pull(Swiglu::GATE_UP)?;
        let mut act = pass.output(Swiglu::ACT)?;
        if let Some(act) = &mut act {
            pass.kernels().run(operation::Swiglu {
                act: act.view_mut(),
                gate_up: gate_up.view(),
            })?;
        }
        pass.put(Swiglu::ACT, act);
        Ok(())
    }

    /// The gradient takes the place of gate and up.
    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let dact = pass.gradient(Swiglu::ACT);
        let mut gate_up = pass.take(Swiglu::GATE_UP)?;
        pass.kernels().run(SwigluBackward {
            gate_up: gate_up.view_mut(),
            dact: dact.view(),
        })?;
        pass.file_gradient(Swiglu::GATE_UP, gate_up);
        Ok(())
    }
}
