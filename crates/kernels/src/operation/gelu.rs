//! The Gaussian error linear unit (Hendrycks and Gimpel 2016), in its form with a tanh: GPT-2's activation.

use super::check::{Check, Checked};
use super::contract::{Contract, Operand, changes, reads, writes};
use memory::{DType, In, Out};

/// `act = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, both `[t, f]`. `largest [1]` (f32): if it is given, the largest
/// magnitude of `act`, as [`super::AbsMax`] finds it.
pub struct Gelu<'a> {
    pub act: Out<'a>,
    pub x: In<'a>,
    pub largest: Option<Out<'a>>,
}

/// The gradient of [`Gelu`] in place: `x` becomes its own gradient. `largest [1]` (f32): if it is given, that of this gradient.
pub struct GeluBackward<'a> {
    pub x: Out<'a>,
    pub dact: In<'a>,
    pub largest: Option<Out<'a>>,
}

impl Contract for Gelu<'_> {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn check(&self, check: &Check) -> Checked {
        let x = &self.x;
        check.real("x", x, x.dims())?;
        check.tensor("act", &self.act, x.dims(), x.dtype())?;
        check.optional("largest", &self.largest, &[1], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let largest = self.largest.iter().map(writes);
        let operands = [writes(&self.act), reads(self.x)];
        operands.into_iter().chain(largest).collect()
    }
}

impl Contract for GeluBackward<'_> {
    fn name(&self) -> &'static str {
        "gelu_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        let x = &self.x;
        check.real("x", x, x.dims())?;
        check.tensor("dact", &self.dact, x.dims(), x.dtype())?;
        check.optional("largest", &self.largest, &[1], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let largest = self.largest.iter().map(writes);
        let operands = [changes(&self.x), reads(self.dact)];
        operands.into_iter().chain(largest).collect()
    }
}
