//! In which form an operation writes what a product in FP8 reads.

use super::check::{Check, Checked};
use super::declaration::{Field, Visit};
use super::operand::OperandRule;
use memory::{In, Out};

/// In which form an operation writes its output. The largest magnitude is `[1]` f32, as [`super::AbsMax`] finds it.
pub enum OutputForm<'a> {
    /// Values in the compute type.
    Values,
    /// Values, and their largest magnitude into this place.
    ValuesAndLargest(Out<'a>),
    /// e4m3 codes, given the largest magnitude of the values: those that [`super::Quantise`] would make.
    Codes(In<'a>),
}

impl OutputForm<'_> {
    pub(super) fn is_codes(&self) -> bool {
        matches!(self, OutputForm::Codes(_))
    }
}

impl<'a> From<Option<Out<'a>>> for OutputForm<'a> {
    fn from(largest: Option<Out<'a>>) -> OutputForm<'a> {
        largest.map_or(OutputForm::Values, OutputForm::ValuesAndLargest)
    }
}

impl Field for OutputForm<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        match self {
            OutputForm::Values => Ok(()),
            OutputForm::ValuesAndLargest(largest) => largest.visit(rule, visit),
            OutputForm::Codes(largest) => largest.visit(rule, visit),
        }
    }
}

impl Check {
    /// Refuses a largest magnitude without the output that it belongs to.
    pub(super) fn has_output(&self, y: &Option<Out>, form: &OutputForm) -> Checked {
        let is_plain = matches!(form, OutputForm::Values);
        self.that(y.is_some() || is_plain, || {
            "`form` has a largest magnitude, and `y` is left out".into()
        })
    }
}
