//! Normalisation by the root of the mean square (Zhang and Sennrich 2019).

use super::Init;
use super::check::{Check, Checked, View};
use super::contract::{Contract, Operand, reads, sets, writes};
use memory::{DType, In, Out};

/// `y [t, h] = x rstd weight`, `rstd [t] (f32) = 1 / sqrt(mean(x^2) + eps)`. Either output may be left out.
/// `largest [1]` (f32): if it is given, beside `y` alone, the largest magnitude of `y`, as [`super::AbsMax`] finds it.
pub struct RmsNorm<'a> {
    pub y: Option<Out<'a>>,
    pub rstd: Option<Out<'a>>,
    pub largest: Option<Out<'a>>,
    pub x: In<'a>,
    pub weight: In<'a>,
    pub eps: f32,
}

/// `dx [t, h] = dx_init + ...`, `dweight [h] = dweight_init + ...` from `dy [t, h]` and the forward pass's inputs and
/// statistics. `dweight` is a gradient: f32 or bf16, summed in f32 and rounded once.
pub struct RmsNormBackward<'a> {
    pub dx: Out<'a>,
    pub dx_init: Init<'a>,
    pub dweight: Out<'a>,
    pub dweight_init: Init<'a>,
    pub dy: In<'a>,
    pub x: In<'a>,
    pub weight: In<'a>,
    pub rstd: In<'a>,
}

impl Contract for RmsNorm<'_> {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn check(&self, check: &Check) -> Checked {
        let x = &self.x;
        check.real_of_rank("x", x, 2)?;
        check.tensor("weight", &self.weight, &x.dims()[1..], x.dtype())?;
        check.optional("y", &self.y, x.dims(), x.dtype())?;
        check.optional("rstd", &self.rstd, &x.dims()[..1], DType::F32)?;
        check.largest_of(&self.y, &self.largest)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let outs = self.y.iter().chain(&self.rstd).chain(&self.largest);
        let ins = [self.x, self.weight].map(reads);
        ins.into_iter().chain(outs.map(writes)).collect()
    }
}

impl Contract for RmsNormBackward<'_> {
    fn name(&self) -> &'static str {
        "rms_norm_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        let x = &self.x;
        check.no_residual(&self.dx_init)?;
        check.no_residual(&self.dweight_init)?;
        check.real_of_rank("x", x, 2)?;
        for (name, tensor) in [("dx", &self.dx as &dyn View), ("dy", &self.dy)] {
            check.tensor(name, tensor, x.dims(), x.dtype())?;
        }
        check.tensor("weight", &self.weight, &x.dims()[1..], x.dtype())?;
        check.real("dweight", &self.dweight, &x.dims()[1..])?;
        check.tensor("rstd", &self.rstd, &x.dims()[..1], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![
            reads(self.x),
            reads(self.dy),
            reads(self.weight),
            reads(self.rstd),
            sets(&self.dx, &self.dx_init),
            sets(&self.dweight, &self.dweight_init),
        ]
    }
}
