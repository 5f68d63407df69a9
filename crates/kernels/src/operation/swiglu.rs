//! The gated activation of the feed-forward layer (Shazeer 2020).

use super::check::{Check, Checked, View};
use super::contract::{Contract, Operand, changes, reads, writes};
use memory::{DType, In, Out};

/// `act [t, f] = silu(gate) up`. Each row of `gate_up [t, 2 f]` has the columns of gate, then those of up. `largest [1]` (f32): if it is
/// given, the largest magnitude of `act`, as [`super::AbsMax`] finds it.
pub struct Swiglu<'a> {
    pub act: Out<'a>,
    pub gate_up: In<'a>,
    pub largest: Option<Out<'a>>,
}

/// Gradients of [`Swiglu`] in place: `gate_up` becomes its own gradient, of `dact [t, f]`. `largest [1]` (f32): if it is given, that of
/// this gradient.
pub struct SwigluBackward<'a> {
    pub gate_up: Out<'a>,
    pub dact: In<'a>,
    pub largest: Option<Out<'a>>,
}

impl Contract for Swiglu<'_> {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn check(&self, check: &Check) -> Checked {
        half_as_wide(check, &self.gate_up, ("act", &self.act))?;
        check.optional("largest", &self.largest, &[1], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let largest = self.largest.iter().map(writes);
        let operands = [writes(&self.act), reads(self.gate_up)];
        operands.into_iter().chain(largest).collect()
    }
}

impl Contract for SwigluBackward<'_> {
    fn name(&self) -> &'static str {
        "swiglu_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        half_as_wide(check, &self.gate_up, ("dact", &self.dact))?;
        check.optional("largest", &self.largest, &[1], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let largest = self.largest.iter().map(writes);
        let operands = [changes(&self.gate_up), reads(self.dact)];
        operands.into_iter().chain(largest).collect()
    }
}

/// Checks `gate_up`, and a tensor with half as many columns.
fn half_as_wide(check: &Check, gate_up: &dyn View, (name, half): (&str, &dyn View)) -> Checked {
    check.real_of_rank("gate_up", gate_up, 2)?;
    check.real_of_rank(name, half, 2)?;
    let half = half.view();
    let &[rows, width] = half.dims() else {
        unreachable!("the rank was checked");
    };
    check.tensor("gate_up", gate_up, &[rows, 2 * width], half.dtype())
}
