//! The gate of attention's output (Qwen3-Next).

use super::{CoreAttention, Qkv, written};
use crate::stage::{Io, Stage};
use crate::{Activation, Extent, Label, Pass, Result};
use kernels::operation::{SigmoidGate, SigmoidGateBackward};

/// gated_o `[b s, heads e]` = o sigmoid(gate).
pub struct AttentionGate {
    /// Width of all heads of the output together.
    pub width: usize,
}

impl AttentionGate {
    /// The input of the output projection behind a gate, that of the gated delta rule too.
    pub const OUT: Activation = Activation::new("gated_o", "d_gated_o", Label::GDN_NORM_OUT);

    const READ: [Activation; 2] = [CoreAttention::O, Qkv::GATE];
}

impl Stage for AttentionGate {
    fn name(&self) -> &'static str {
        "attn_gate"
    }

    fn io(&self) -> Io {
        Io {
            reads: Self::READ.to_vec(),
            writes: vec![(Self::OUT, Extent::tokens(self.width))],
            backward_reads: Self::READ.to_vec(),
        }
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let (o, gate) = (pass.pull(CoreAttention::O)?, pass.pull(Qkv::GATE)?);
        let mut out = pass.output(Self::OUT)?;
        if let Some(out) = written(&mut out) {
            pass.kernels().run(SigmoidGate {
                out,
                x: o.view(),
                gate: gate.view(),
            })?;
        }
        pass.put(Self::OUT, out);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let dout = pass.gradient(Self::OUT);
        let (o, gate) = (pass.pull(CoreAttention::O)?, pass.pull(Qkv::GATE)?);
        let [(mut d_o, _), (mut dgate, _)] = [
            pass.gradient_to_add(CoreAttention::O)?,
            pass.gradient_to_add(Qkv::GATE)?,
        ];
        pass.kernels().run(SigmoidGateBackward {
            dx: d_o.view_mut(),
            dgate: dgate.view_mut(),
            dout: dout.view(),
            x: o.view(),
            gate: gate.view(),
        })?;
        pass.file_gradient(CoreAttention::O, d_o);
        pass.file_gradient(Qkv::GATE, dgate);
        Ok(())
    }
}
