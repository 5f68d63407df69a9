//! Layer normalisation (Ba, Kiros and Hinton 2016).

use super::Init;
use super::check::{Check, Checked, View};
use super::contract::{Contract, Operand, reads, sets, writes};
use memory::{DType, In, Out};

/// `y [t, h] = (x - mean) rstd weight + bias`, with the row's `mean [t]` and `rstd [t] = 1 / sqrt(variance + eps)`,
/// both f32. The variance is the mean of `(x - mean)^2`. Any output may be left out.
/// `largest` as in [`super::RmsNorm`].
pub struct LayerNorm<'a> {
    pub y: Option<Out<'a>>,
    pub mean: Option<Out<'a>>,
    pub rstd: Option<Out<'a>>,
    pub largest: Option<Out<'a>>,
    pub x: In<'a>,
    pub weight: In<'a>,
    pub bias: In<'a>,
    pub eps: f32,
}

/// `dx [t, h] = dx_init + ...`, `dweight [h] = dweight_init + ...`, `dbias [h] = dbias_init + ...` from `dy [t, h]` and
/// the forward pass's inputs and statistics. `dweight` and `dbias` are gradients: f32 or bf16, summed in f32 and
/// rounded once.
pub struct LayerNormBackward<'a> {
    pub dx: Out<'a>,
    pub dx_init: Init<'a>,
    pub dweight: Out<'a>,
    pub dweight_init: Init<'a>,
    pub dbias: Out<'a>,
    pub dbias_init: Init<'a>,
    pub dy: In<'a>,
    pub x: In<'a>,
    pub weight: In<'a>,
    pub mean: In<'a>,
    pub rstd: In<'a>,
}

impl Contract for LayerNorm<'_> {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn check(&self, check: &Check) -> Checked {
        let x = &self.x;
        check.real_of_rank("x", x, 2)?;
        for (name, tensor) in [("weight", &self.weight), ("bias", &self.bias)] {
            check.tensor(name, tensor, &x.dims()[1..], x.dtype())?;
        }
        check.optional("y", &self.y, x.dims(), x.dtype())?;
        check.optional("mean", &self.mean, &x.dims()[..1], DType::F32)?;
        check.optional("rstd", &self.rstd, &x.dims()[..1], DType::F32)?;
        check.largest_of(&self.y, &self.largest)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let outs = [&self.y, &self.mean, &self.rstd, &self.largest];
        let outs = outs.into_iter().flatten();
        let ins = [self.x, self.weight, self.bias].map(reads);
        ins.into_iter().chain(outs.map(writes)).collect()
    }
}

impl Contract for LayerNormBackward<'_> {
    fn name(&self) -> &'static str {
        "layer_norm_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        let x = &self.x;
        for init in [&self.dx_init, &self.dweight_init, &self.dbias_init] {
            check.no_residual(init)?;
        }
        check.real_of_rank("x", x, 2)?;
        for (name, tensor) in [("dx", &self.dx as &dyn View), ("dy", &self.dy)] {
            check.tensor(name, tensor, x.dims(), x.dtype())?;
        }
        check.tensor("weight", &self.weight, &x.dims()[1..], x.dtype())?;
        for (name, gradient) in [("dweight", &self.dweight), ("dbias", &self.dbias)] {
            check.real(name, gradient, &x.dims()[1..])?;
        }
        for (name, statistic) in [("mean", &self.mean), ("rstd", &self.rstd)] {
            check.tensor(name, statistic, &x.dims()[..1], DType::F32)?;
        }
        Ok(())
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let ins = [self.x, self.dy, self.weight, self.mean, self.rstd].map(reads);
        let outs = [
            sets(&self.dx, &self.dx_init),
            sets(&self.dweight, &self.dweight_init),
            sets(&self.dbias, &self.dbias_init),
        ];
        ins.into_iter().chain(outs).collect()
    }
}
