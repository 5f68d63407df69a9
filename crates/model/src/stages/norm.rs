//! Norms over the last dimension: RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016).

use crate::activation::Dimension;
use crate::fp8::{CodedOutput, Fp8Reader};
use crate::parameters::{Initial, ParameterId, PartParameters};
use crate::stage::{Io, Stage};
use crate::{Activation, Extent, Label, Pass, Result};
use kernels::Init;
use kernels::operation::{LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};
use memory::{Buffer, In, Out};
use std::rc::Rc;

/// A norm with its parameters.
#[derive(Clone, Debug)]
pub struct Norm {
    weight: ParameterId,
    /// LayerNorm has a bias, and subtracts the mean; RMSNorm does neither.
    bias: Option<ParameterId>,
    eps: f32,
    /// It multiplies by 1 + its weight.
    is_zero_centered: bool,
    width: usize,
    /// The layer that alone reads what it makes, if its products are in FP8.
    pub(crate) read_by: Option<Fp8Reader>,
}

impl Norm {
    /// RMSNorm, `y = x rstd weight`: declares `name.weight [width]`.
    pub fn rms(parameters: &mut PartParameters, name: &str, width: usize, eps: f64) -> Norm {
        Norm::declare(parameters, name, width, (eps, false))
    }

    /// RMSNorm with a weight around 0, `y = x rstd (1 + weight)`: declares `name.weight [width]`.
    pub fn zero_centered_rms(
        parameters: &mut PartParameters,
        name: &str,
        width: usize,
        eps: f64,
    ) -> Norm {
        Norm::declare(parameters, name, width, (eps, true))
    }

    fn declare(
        parameters: &mut PartParameters,
        name: &str,
        width: usize,
        (eps, is_zero_centered): (f64, bool),
    ) -> Norm {
        let initial = match is_zero_centered {
            true => Initial::Zero,
            false => Initial::One,
        };
        Norm {
            weight: parameters.vector(&format!("{name}.weight"), width, initial),
            bias: None,
            eps: eps as f32,
            is_zero_centered,
            width,
            read_by: None,
        }
    }

    /// LayerNorm, `y = (x - mean) rstd weight + bias`: declares `name.weight` and `name.bias [width]`.
    pub fn layer(parameters: &mut PartParameters, name: &str, width: usize, eps: f64) -> Norm {
        let norm = Norm::rms(parameters, name, width, eps);
        let bias = parameters.vector(&format!("{name}.bias"), width, Initial::Zero);
        Norm {
            bias: Some(bias),
            ..norm
        }
    }

    /// Its parameters.
    pub fn parameters(&self) -> Vec<ParameterId> {
        [self.weight].into_iter().chain(self.bias).collect()
    }

    /// Names of the statistics that its backward pass reads, `[t]` f32 each.
    pub(crate) fn statistics(&self) -> &'static [&'static str] {
        match self.bias {
            None => &["final_rstd"],
            Some(_) => &["final_mean", "final_rstd"],
        }
    }

    /// Normalises `x [t, width]`. Each output may be left out: `y`, and the statistics in the order of their names. If `y` becomes codes
    /// for its reader, its largest magnitude is found too; if `y` is codes, that magnitude is known.
    ///
    /// # Errors
    /// [`ModelError::Kernel`](crate::ModelError::Kernel) if the device fails.
    pub fn forward<'o>(
        &self,
        pass: &mut Pass,
        y: Option<Out<'o>>,
        statistics: impl IntoIterator<Item = Option<Out<'o>>>,
        x: In,
    ) -> Result {
        let (kernels, eps) = (pass.kernels(), self.eps);
        let read_by = y.as_ref().and(self.read_by);
        let made = y.as_ref().map_or(x.dtype(), Out::dtype);
        let (parameters, form) = pass.parameters_and_form(&self.parameters(), (read_by, made));
        let mut statistics = statistics.into_iter();
        let mut next = || statistics.next().flatten();
        Ok(match parameters[..] {
            [weight] => kernels.run(RmsNorm {
                y,
                rstd: next(),
                form,
                x,
                weight,
                plus_one: self.is_zero_centered,
                eps,
            }),
            [weight, bias] => kernels.run(LayerNorm {
                y,
                mean: next(),
                rstd: next(),
                form,
                x,
                weight,
                bias,
                eps,
            }),
            _ => unreachable!("a norm has a weight, or a weight and a bias"),
        }?)
    }

    /// `dx = init + ...` from `dy`, and from what the forward pass read and made. Adds to the parameters' gradients.
    ///
    /// # Errors
    /// As [`Norm::forward`].
    pub fn backward(
        &self,
        pass: &mut Pass,
        (dx, dx_init): (Out, Init),
        dy: In,
        x: In,
        statistics: &[In],
    ) -> Result {
        let kernels = pass.kernels();
        let Some(bias) = self.bias else {
            let mut unused = pass.unused_gradients([self.weight])?;
            let ([weight], [(dweight, dweight_init)]) =
                pass.parameters_and_gradients([self.weight], &mut unused);
            return Ok(kernels.run(RmsNormBackward {
                dx,
                dx_init,
                dweight,
                dweight_init,
                dy,
                x,
                weight,
                plus_one: self.is_zero_centered,
                rstd: statistics[0],
            })?);
        };
        let mut unused = pass.unused_gradients([self.weight, bias])?;
        let ([weight, _], gradients) =
            pass.parameters_and_gradients([self.weight, bias], &mut unused);
        let [(dweight, dweight_init), (dbias, dbias_init)] = gradients;
        Ok(kernels.run(LayerNormBackward {
            dx,
            dx_init,
            dweight,
            dweight_init,
            dbias,
            dbias_init,
            dy,
            x,
            weight,
            mean: statistics[0],
            rstd: statistics[1],
        })?)
    }
}

/// output, statistics = norm(input).
pub struct NormStage {
    /// The name in reports.
    pub name: &'static str,
    /// The norm.
    pub norm: Norm,
    /// What is normalised.
    pub input: Activation,
    /// The activation that it writes.
    pub output: Activation,
    /// Its mean, in a LayerNorm, and its reciprocal deviation, `[b s]` f32 each.
    pub statistics: Vec<Activation>,
}

impl NormStage {
    /// Input of attention.
    pub const H1: Activation = Activation::new("h1", "d_h1", Label::LAYERNORM);
    /// Mean of the first norm's input, whose output is [`NormStage::H1`].
    pub const MEAN1: Activation = Activation::new("mean1", "d_mean1", Label::LAYERNORM);
    /// Reciprocal deviation of the first norm's input, or reciprocal root mean square.
    pub const RSTD1: Activation = Activation::new("rstd1", "d_rstd1", Label::LAYERNORM);
    /// Input of the feed-forward layer.
    pub const H2: Activation = Activation::new("h2", "d_h2", Label::LAYERNORM);
    /// Mean of the second norm's input, whose output is [`NormStage::H2`].
    pub const MEAN2: Activation = Activation::new("mean2", "d_mean2", Label::LAYERNORM);
    /// Reciprocal deviation of the second norm's input, or reciprocal root mean square.
    pub const RSTD2: Activation = Activation::new("rstd2", "d_rstd2", Label::LAYERNORM);
}

/// output `[b s, h]` = residual + norm(input): a norm behind attention or the feed-forward layer (OLMo 2).
pub struct NormBehind {
    /// The name in reports.
    pub name: &'static str,
    /// The norm.
    pub norm: Norm,
    /// What is normalised.
    pub input: Activation,
    /// The residual stream that it is added to.
    pub residual: Activation,
    /// The sum.
    pub output: Activation,
    /// Reciprocal root mean square of the input.
    pub rstd: Activation,
}

impl NormBehind {
    /// What attention adds to the residual stream, before its norm.
    pub const ATTN: Activation = Activation::new("attn_proj", "d_attn_proj", Label::NORM_INPUT);
    /// What the feed-forward layer adds, before its norm.
    pub const MLP: Activation = Activation::new("mlp_proj", "d_mlp_proj", Label::NORM_INPUT);
    /// The statistic of a norm behind attention, where another stands in front.
    pub const RSTD_ATTN: Activation =
        Activation::new("rstd_attn_proj", "no_gradient", Label::LAYERNORM);
    /// The statistic of a norm behind the feed-forward layer, where another stands in front.
    pub const RSTD_MLP: Activation =
        Activation::new("rstd_mlp_proj", "no_gradient", Label::LAYERNORM);
}

impl Stage for NormBehind {
    fn name(&self) -> &'static str {
        self.name
    }

    fn io(&self) -> Io {
        let rstd = Extent::of_f32(&[Dimension::Tokens]);
        Io {
            reads: vec![self.input, self.residual],
            writes: vec![
                (self.output, Extent::tokens(self.norm.width)),
                (self.rstd, rstd),
            ],
            backward_reads: vec![self.input, self.rstd],
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        self.norm.parameters()
    }

    /// It has a vector alone.
    fn can_defer_gradients(&self) -> bool {
        true
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let (x, residual) = (pass.pull(self.input)?, pass.pull(self.residual)?);
        let (mut out, mut rstd) = (pass.output(self.output)?, pass.output(self.rstd)?);
        let y = super::written(&mut out);
        self.norm
            .forward(pass, y, [super::written(&mut rstd)], x.view())?;
        if let Some(out) = super::written(&mut out) {
            super::add(pass.kernels(), out, residual.view())?;
        }
        pass.put(self.output, out);
        pass.put(self.rstd, rstd);
        Ok(())
    }

    /// The gradient of the sum is also the residual's, and is filed unchanged.
    fn backward(&self, pass: &mut Pass) -> Result {
        let dsum = pass.gradient(self.output);
        let (x, rstd) = (pass.pull(self.input)?, pass.pull(self.rstd)?);
        let (mut dx, init) = pass.gradient_to_add(self.input)?;
        let added = (dx.view_mut(), init);
        let statistics = [rstd.view()];
        self.norm
            .backward(pass, added, dsum.view(), x.view(), &statistics)?;
        pass.file_gradient(self.input, dx);
        pass.file_gradient(self.residual, dsum);
        Ok(())
    }
}

impl Stage for NormStage {
    fn name(&self) -> &'static str {
        self.name
    }

    fn io(&self) -> Io {
        let statistics = self.statistics.iter();
        let statistics = statistics.map(|of| (*of, Extent::of_f32(&[Dimension::Tokens])));
        let extent = super::extent_of(self.norm.read_by, self.norm.width);
        let output = (self.output, extent);
        Io {
            reads: vec![self.input],
            writes: [output].into_iter().chain(statistics).collect(),
            backward_reads: [&[self.input], &self.statistics[..]].concat(),
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        self.norm.parameters()
    }

    /// It has vectors alone.
    fn can_defer_gradients(&self) -> bool {
        true
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let x = pass.pull(self.input)?;
        let mut y = pass.coded_output(self.output, self.norm.read_by)?;
        let kept = self.statistics.iter().map(|of| pass.output(*of));
        let mut kept = kept.collect::<Result<Vec<_>, _>>()?;
        let statistics = kept.iter_mut().map(super::written);
        let norm = &self.norm;
        let out = y.as_mut().map(CodedOutput::view_mut);
        norm.forward(pass, out, statistics, x.view())?;
        pass.put_coded(self.output, norm.read_by, y)?;
        for (of, kept) in self.statistics.iter().zip(kept) {
            pass.put(*of, kept);
        }
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let dy = pass.gradient(self.output);
        let x = pass.pull(self.input)?;
        let kept = self.statistics.iter().map(|of| pass.pull(*of));
        let kept = kept.collect::<Result<Vec<Rc<Buffer>>, _>>()?;
        let statistics: Vec<In> = kept.iter().map(|kept| kept.view()).collect();
        let (mut dx, init) = pass.gradient_to_add(self.input)?;
        let added = (dx.view_mut(), init);
        let norm = &self.norm;
        norm.backward(pass, added, dy.view(), x.view(), &statistics)?;
        pass.file_gradient(self.input, dx);
        Ok(())
    }
}
