//! Values, copies and biases.

use super::Init;
use super::check::{Check, Checked, View};
use super::contract::{Contract, Operand, changes, reads, sets, writes};
use memory::{In, Out};

/// Sets every element of `out`, of any shape.
pub struct Fill<'a> {
    pub out: Out<'a>,
    pub value: f32,
}

/// Copies between tensors of one shape, converting between f32 and bf16. Rows of matrices may have gaps between them
/// (`.columns()`).
pub struct Copy<'a> {
    pub out: Out<'a>,
    pub x: In<'a>,
}

/// `out [t, n] += bias [n]` on every row. There may be gaps between rows (`.columns()`).
pub struct AddBias<'a> {
    pub out: Out<'a>,
    pub bias: In<'a>,
}

/// `out [n] = init + sum of the rows of dy [t, n]`, which may have gaps between them (`.columns()`). A gradient: f32 or
/// bf16, summed in f32 and rounded once.
pub struct BiasBackward<'a> {
    pub out: Out<'a>,
    pub dy: In<'a>,
    pub init: Init<'a>,
}

impl Contract for Fill<'_> {
    fn name(&self) -> &'static str {
        "fill"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real("out", &self.out, self.out.dims())
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![writes(&self.out)]
    }
}

impl Contract for Copy<'_> {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn check(&self, check: &Check) -> Checked {
        let shape = self.x.dims();
        for (name, x) in [("out", &self.out as &dyn View), ("x", &self.x)] {
            match shape.len() {
                2 => check.real_by_rows(name, x, shape)?,
                _ => check.real(name, x, shape)?,
            }
        }
        Ok(())
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![writes(&self.out), reads(self.x)]
    }
}

impl Contract for AddBias<'_> {
    fn name(&self) -> &'static str {
        "add_bias"
    }

    fn check(&self, check: &Check) -> Checked {
        let AddBias { out, bias } = self;
        check.rank("out", out, 2)?;
        check.real_by_rows("out", out, out.dims())?;
        check.tensor("bias", bias, &out.dims()[1..], out.dtype())
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![changes(&self.out), reads(self.bias)]
    }
}

impl Contract for BiasBackward<'_> {
    fn name(&self) -> &'static str {
        "bias_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        check.no_residual(&self.init)?;
        check.rank("dy", &self.dy, 2)?;
        check.real_by_rows("dy", &self.dy, self.dy.dims())?;
        check.real("out", &self.out, &self.dy.dims()[1..])
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![reads(self.dy), sets(&self.out, &self.init)]
    }
}
