//! The parts that checks of operations are made of.

use crate::KernelError;
use crate::Result;
use memory::DType;

/// Ok, or why an operation does not fit.
pub(crate) type Checked = Result;

/// The checks of one operation.
pub(crate) struct Check {
    /// The operation's name, for messages.
    pub(crate) operation: &'static str,
    /// Whether matrix products may have bf16 operands.
    pub(crate) widens: bool,
}

impl Check {
    pub(crate) fn that(&self, condition: bool, message: impl FnOnce() -> String) -> Checked {
        KernelError::unless(condition, self.operation, message)
    }

    /// Refuses a number that is not finite and positive.
    pub(super) fn positive(&self, name: &str, value: f32) -> Checked {
        self.that(value.is_finite() && value > 0.0, || {
            format!("`{name}` is {value}, expected a finite number above 0")
        })
    }

    /// Refuses bf16 if there is no workspace to pack it in.
    pub(crate) fn product_of(&self, dtypes: &[DType]) -> Checked {
        let all_f32 = dtypes.iter().all(|dtype| *dtype == DType::F32);
        self.that(self.widens || all_f32, || {
            "these kernels were made for f32 and have no workspace to widen bf16 in".into()
        })
    }

    /// Refuses a range that does not begin at a block of elements.
    pub(crate) fn first(&self, name: &str, first: u64) -> Checked {
        let block = crate::quantise::BLOCK;
        self.that(first.is_multiple_of(block as u64), || {
            format!("`{name}` is {first}, expected a multiple of {block}")
        })
    }
}
