//! The loss of preferences between pairs of sequences, with its gradient.

use super::check::{Check, Checked};
use super::contract::{Contract, Operand, reads, writes};
use memory::{DType, In, Out};

/// Direct preference optimisation (Rafailov et al. 2023) of p pairs of sequences, the chosen one before the rejected one.
/// `policy [2 p]` and `reference [2 p]` have the sum of each sequence's losses, its negative log-probability, under the
/// model and under the one that it began as. The reward of a sequence is `beta (reference - policy)`, and the loss of a pair
/// is -ln sigmoid(chosen reward - rejected reward). All are f32.
///
/// `marks [4, p]` receive for each pair its loss, the rewards of the chosen and of the rejected sequence, and 1 where the
/// chosen one's is larger, else 0. `factors [2 p]` receive the derivative of the loss by the sequence's entry of `policy`,
/// times `scale [1]`: what the gradients of its tokens' losses are multiplied by ([`super::CrossEntropy`]).
pub struct PreferenceLoss<'a> {
    pub factors: Out<'a>,
    pub marks: Out<'a>,
    pub policy: In<'a>,
    pub reference: In<'a>,
    pub scale: In<'a>,
    pub beta: f32,
}

impl Contract for PreferenceLoss<'_> {
    fn name(&self) -> &'static str {
        "preference_loss"
    }

    fn check(&self, check: &Check) -> Checked {
        check.rank("marks", &self.marks, 2)?;
        let pairs = self.marks.dims()[1];
        check.tensor("marks", &self.marks, &[4, pairs], DType::F32)?;
        check.tensor("factors", &self.factors, &[2 * pairs], DType::F32)?;
        check.tensor("policy", &self.policy, &[2 * pairs], DType::F32)?;
        check.tensor("reference", &self.reference, &[2 * pairs], DType::F32)?;
        check.tensor("scale", &self.scale, &[1], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![
            writes(&self.factors),
            writes(&self.marks),
            reads(self.policy),
            reads(self.reference),
        ]
    }
}
