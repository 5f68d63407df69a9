//! The gated activation of the feed-forward layer (Shazeer 2020).

use super::check::{Check, Checked, View};
use super::contract::{Contract, Operand, changes, reads, writes};
use memory::{In, Out};

/// `act = silu(gate) up`, all `[t, f]`.
pub struct Swiglu<'a> {
    pub act: Out<'a>,
    pub gate: In<'a>,
    pub up: In<'a>,
}

/// Gradients of [`Swiglu`] in place: `gate` becomes its own gradient, and so does `up`.
pub struct SwigluBackward<'a> {
    pub gate: Out<'a>,
    pub up: Out<'a>,
    pub dact: In<'a>,
}

impl Contract for Swiglu<'_> {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn check(&self, check: &Check) -> Checked {
        alike(check, &self.gate, [("up", &self.up), ("act", &self.act)])
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![writes(&self.act), reads(self.gate), reads(self.up)]
    }
}

impl Contract for SwigluBackward<'_> {
    fn name(&self) -> &'static str {
        "swiglu_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        alike(check, &self.gate, [("up", &self.up), ("dact", &self.dact)])
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![changes(&self.gate), changes(&self.up), reads(self.dact)]
    }
}

/// Tensors of the shape and type of `gate`.
fn alike(check: &Check, gate: &dyn View, others: [(&str, &dyn View); 2]) -> Checked {
    let like = gate.view();
    check.real("gate", gate, like.dims())?;
    others
        .into_iter()
        .try_for_each(|(name, x)| check.tensor(name, x, like.dims(), like.dtype()))
}
