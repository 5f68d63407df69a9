//! The activation function of the feed-forward layer: that of gate and up (Shazeer 2020), or, without a gate, the tanh form of
//! GELU (Hendrycks and Gimpel 2016).

use crate::fp8::{Fp8Layer, Fp8Reader};
use crate::stage::{Io, Stage};
use crate::{Activation, Label, Pass, Result};
use kernels::operation::{
    GateFunction, GatedActivation, GatedActivationBackward, Gelu, GeluBackward,
};

/// act `[b s, f]` = function(gate) up, or gelu(fc).
pub struct MlpActivation {
    /// The function of gate and up; none: GELU, without a gate.
    pub gate: Option<GateFunction>,
    /// Width of act.
    pub width: usize,
    /// The layer that alone reads act, if its products are in FP8.
    pub read_by: Option<Fp8Reader>,
    /// The layer that makes its input, if that one's products are in FP8.
    pub made_by: Option<Fp8Layer>,
}

impl MlpActivation {
    /// `[b s, 2 f]`: gate and up, side by side.
    pub const GATE_UP: Activation = Activation::new("gate_up", "d_gate_up", Label::MLP);
    /// `[b s, f]`: the first product of a feed-forward layer without a gate.
    pub const FC: Activation = Activation::new("fc", "d_fc", Label::MLP);
    /// The output of the activation function.
    pub const ACT: Activation = Activation::new("act", "d_act", Label::MLP_ACT);

    fn input(&self) -> Activation {
        match self.gate {
            Some(_) => MlpActivation::GATE_UP,
            None => MlpActivation::FC,
        }
    }
}

impl Stage for MlpActivation {
    fn name(&self) -> &'static str {
        "mlp_act"
    }

    fn io(&self) -> Io {
        Io {
            reads: vec![self.input()],
            writes: vec![(
                MlpActivation::ACT,
                super::extent_of(self.read_by, self.width),
            )],
            backward_reads: vec![self.input()],
        }
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let x = pass.pull(self.input())?;
        let mut out = pass.coded_output(MlpActivation::ACT, self.read_by)?;
        if let Some(out) = &mut out {
            let (kernels, act, x) = (pass.kernels(), out.view_mut(), x.view());
            let form = pass.input_form(self.read_by, act.dtype());
            match self.gate {
                Some(function) => kernels.run(GatedActivation {
                    act,
                    gate_up: x,
                    form,
                    function,
                }),
                None => kernels.run(Gelu { act, x, form }),
            }?;
        }
        pass.put_coded(MlpActivation::ACT, self.read_by, out)
    }

    /// The gradient overwrites the stage's input.
    fn backward(&self, pass: &mut Pass) -> Result {
        let gradient = pass.gradient(MlpActivation::ACT);
        let mut input = pass.take(self.input())?;
        let (kernels, x, dact) = (pass.kernels(), input.view_mut(), gradient.view());
        let largest = pass.largest_gradient_to_find(self.made_by);
        match self.gate {
            Some(function) => kernels.run(GatedActivationBackward {
                gate_up: x,
                dact,
                largest,
                function,
            }),
            None => kernels.run(GeluBackward { x, dact, largest }),
        }?;
        pass.file_gradient(self.input(), input);
        Ok(())
    }
}
