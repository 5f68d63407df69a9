//! What operations do for a product in FP8 that reads what they make.

use super::check::{Check, Checked};
use super::declaration::{Field, Visit};
use super::operand::OperandRule;
use memory::{In, Out};

/// What an operation does about the largest magnitude of what it makes, `[1]` f32, as [`super::AbsMax`] finds it.
pub enum LargestMagnitude<'a> {
    /// Nothing: no product in FP8 reads the result, or the magnitude is known and values are wanted.
    Unused,
    /// Finds it.
    Find(Out<'a>),
    /// Makes e4m3 codes in place of values: those that [`super::Quantise`] makes of the values and this magnitude.
    Known(In<'a>),
}

impl LargestMagnitude<'_> {
    pub(super) fn is_known(&self) -> bool {
        matches!(self, LargestMagnitude::Known(_))
    }
}

impl<'a> From<Option<Out<'a>>> for LargestMagnitude<'a> {
    fn from(out: Option<Out<'a>>) -> LargestMagnitude<'a> {
        out.map_or(LargestMagnitude::Unused, LargestMagnitude::Find)
    }
}

impl Field for LargestMagnitude<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        match self {
            LargestMagnitude::Unused => Ok(()),
            LargestMagnitude::Find(out) => out.visit(rule, visit),
            LargestMagnitude::Known(largest) => largest.visit(rule, visit),
        }
    }
}

impl Check {
    /// Refuses a largest magnitude of an output that is left out.
    pub(super) fn largest_of(&self, y: &Option<Out>, largest: &LargestMagnitude) -> Checked {
        let is_unused = matches!(largest, LargestMagnitude::Unused);
        self.that(y.is_some() || is_unused, || {
            "`largest` is that of `y`, which is left out".into()
        })
    }
}
