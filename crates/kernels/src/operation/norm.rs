//! Sums over whole arenas: the loss of a step, and the norm of its gradients.

use super::Init;
use super::check::{Check, Checked};
use super::contract::{Contract, Operand, reads};
use memory::{DType, In, Out};

/// Number of partial sums that [`NormAndClip`] keeps, whatever the size and the number of threads.
pub const NORM_PARTS: usize = 256;

/// `out [1] (f32) = init + sum of x [n] (f32)`.
pub struct Sum<'a> {
    pub out: Out<'a>,
    pub x: In<'a>,
    pub init: Init<'a>,
}

/// `out [2] (f32)` = the Euclidean norm of `x [n]` (f32 or bf16) and the clipping factor min(1, max_norm / (norm +
/// 1e-6)); 1 where `max_norm` is none; NaN where the norm or `loss [1]` (f32) is not finite, so that [`super::AdamW`]
/// skips the step. Squares are f32: a norm above 1.8e19 counts as not finite. `parts [NORM_PARTS]` (f64) is scratch.
pub struct NormAndClip<'a> {
    pub out: Out<'a>,
    pub parts: Out<'a>,
    pub x: In<'a>,
    pub loss: In<'a>,
    pub max_norm: Option<f32>,
}

impl Contract for Sum<'_> {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn check(&self, check: &Check) -> Checked {
        check.no_residual(&self.init)?;
        check.rank("x", &self.x, 1)?;
        check.tensor("x", &self.x, self.x.dims(), DType::F32)?;
        check.tensor("out", &self.out, &[1], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![reads(self.x)]
    }
}

impl Contract for NormAndClip<'_> {
    fn name(&self) -> &'static str {
        "norm_and_clip"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real_of_rank("x", &self.x, 1)?;
        check.tensor("loss", &self.loss, &[1], DType::F32)?;
        check.tensor("parts", &self.parts, &[NORM_PARTS], DType::F64)?;
        check.tensor("out", &self.out, &[2], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![reads(self.x)]
    }
}
