//! The loss of next-token prediction, with its gradient.

use super::check::{Check, Checked};
use super::contract::{Contract, Operand, changes, reads, writes};
use memory::{DType, In, Out};

/// Cross-entropy of `logits [t, v]` against `targets [t]` (i32; negative: masked). `losses [t]` (f32) receives each
/// token's loss, 0 where masked; `logits` become their gradient times `scale [1]` (f32), or 1 where it is left out. It lies
/// on the device, so that what was asked for once can be asked for again as it is.
pub struct CrossEntropy<'a> {
    pub losses: Out<'a>,
    pub logits: Out<'a>,
    pub targets: In<'a>,
    pub scale: Option<In<'a>>,
}

impl Contract for CrossEntropy<'_> {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real_of_rank("logits", &self.logits, 2)?;
        let tokens = &self.logits.dims()[..1];
        check.tensor("losses", &self.losses, tokens, DType::F32)?;
        check.tensor("targets", &self.targets, tokens, DType::I32)?;
        match &self.scale {
            Some(scale) => check.tensor("scale", scale, &[1], DType::F32),
            None => Ok(()),
        }
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![
            changes(&self.logits),
            writes(&self.losses),
            reads(self.targets),
        ]
    }
}
