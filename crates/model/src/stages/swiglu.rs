//! The gated activation function of the feed-forward layer (Shazeer 2020).

use crate::activation::Label;
use crate::stage::{Io, Stage};
use crate::{Activation, Extent, ModelError, Pass};
use kernels::operation::{self, SwigluBackward};

/// act `[b s, f]` = silu(gate) up.
pub struct Swiglu {
    /// Width of gate, up and act.
    pub width: usize,
}

impl Swiglu {
    /// The gate.
    pub const GATE: Activation = Activation::new("gate", "d_gate", Label::Mlp);
    /// What it lets through.
    pub const UP: Activation = Activation::new("up", "d_up", Label::Mlp);
    /// silu(gate) up.
    pub const ACT: Activation = Activation::new("act", "d_act", Label::MlpAct);
}

impl Stage for Swiglu {
    fn name(&self) -> &'static str {
        "mlp_act"
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![Swiglu::GATE, Swiglu::UP],
            writes: vec![(Swiglu::ACT, Extent::tokens(self.width))],
            backward_reads: vec![Swiglu::GATE, Swiglu::UP],
        }
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let (gate, up) = (pass.pull(Swiglu::GATE)?, pass.pull(Swiglu::UP)?);
        let mut act = pass.output(Swiglu::ACT)?;
        if let Some(act) = &mut act {
            pass.kernels().run(operation::Swiglu {
                act: act.view_mut(),
                gate: gate.view(),
                up: up.view(),
            })?;
        }
        pass.put(Swiglu::ACT, act);
        Ok(())
    }

    /// The gradients take the places of gate and up.
    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let dact = pass.gradient(Swiglu::ACT);
        let (mut gate, mut up) = (pass.take(Swiglu::GATE)?, pass.take(Swiglu::UP)?);
        pass.kernels().run(SwigluBackward {
            gate: gate.view_mut(),
            up: up.view_mut(),
            dact: dact.view(),
        })?;
        pass.file_gradient(Swiglu::GATE, gate);
        pass.file_gradient(Swiglu::UP, up);
        Ok(())
    }
}
