//! The norm behind the gated delta rule.

use super::{AttentionGate, CoreAttention, DeltaColumns, written};
use crate::activation::Dimension;
use crate::parameters::{Initial, ParameterId, PartParameters};
use crate::stage::{Io, Stage};
use crate::{Activation, DeltaConfig, Extent, Label, Pass, Result};
use kernels::operation::{GatedNorm, GatedNormBackward};

/// The norm of each head of o, times the SiLU of z.
pub struct DeltaNorm {
    columns: DeltaColumns,
    weight: ParameterId,
    eps: f32,
}

impl DeltaNorm {
    /// Reciprocal root mean square of each head of o, `[b s, value_heads]` f32.
    pub const RSTD: Activation = Activation::new("rstd_o", "no_gradient", Label::GDN_NORM_OUT);

    /// Declares `norm.weight [V]`, which multiplies as it is also in models whose other norms are zero-centred.
    pub(crate) fn declare(own: &mut PartParameters, delta: &DeltaConfig, eps: f64) -> DeltaNorm {
        DeltaNorm {
            columns: DeltaColumns::of(delta),
            weight: own.vector(
                "linear_attn.norm.weight",
                delta.value_head_dim,
                Initial::One,
            ),
            eps: eps as f32,
        }
    }
}

impl Stage for DeltaNorm {
    fn name(&self) -> &'static str {
        "gdn_norm"
    }

    fn io(&self) -> Io {
        let rstd = [Dimension::Tokens, Dimension::Fixed(self.columns.heads)];
        Io {
            reads: vec![CoreAttention::O, DeltaColumns::IN],
            writes: vec![
                (AttentionGate::OUT, Extent::tokens(self.columns.values)),
                (Self::RSTD, Extent::of_f32(&rstd)),
            ],
            backward_reads: vec![CoreAttention::O, DeltaColumns::IN, Self::RSTD],
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        vec![self.weight]
    }

    /// It has a vector alone.
    fn can_defer_gradients(&self) -> bool {
        true
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let (o, x) = (pass.pull(CoreAttention::O)?, pass.pull(DeltaColumns::IN)?);
        let (mut y, mut rstd) = (pass.output(AttentionGate::OUT)?, pass.output(Self::RSTD)?);
        if y.is_some() || rstd.is_some() {
            pass.kernels().run(GatedNorm {
                y: written(&mut y),
                rstd: written(&mut rstd),
                x: o.view(),
                z: self.columns.z(x.view()),
                weight: pass.parameter(self.weight),
                eps: self.eps,
            })?;
        }
        pass.put(AttentionGate::OUT, y);
        pass.put(Self::RSTD, rstd);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let dy = pass.gradient(AttentionGate::OUT);
        let (o, x) = (pass.pull(CoreAttention::O)?, pass.pull(DeltaColumns::IN)?);
        let rstd = pass.pull(Self::RSTD)?;
        let (mut d_o, _) = pass.gradient_to_add(CoreAttention::O)?;
        let (mut dx, _) = pass.gradient_to_add(DeltaColumns::IN)?;
        let [_, dz, _, _] = self.columns.split(dx.view_mut());
        let mut unused = pass.unused_gradients([self.weight])?;
        let kernels = pass.kernels();
        let ([weight], [(dweight, init)]) =
            pass.parameters_and_gradients([self.weight], &mut unused);
        kernels.run(GatedNormBackward {
            dx: d_o.view_mut(),
            dz,
            dweight,
            init,
            dy: dy.view(),
            x: o.view(),
            z: self.columns.z(x.view()),
            weight,
            rstd: rstd.view(),
        })?;
        pass.file_gradient(CoreAttention::O, d_o);
        pass.file_gradient(DeltaColumns::IN, dx);
        Ok(())
    }
}
