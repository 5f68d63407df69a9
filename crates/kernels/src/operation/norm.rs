//! Sums over whole arenas: the loss of a step, and the norm of its gradients.

use super::Init;
use super::check::{Check, Checked};
use super::contract::{Contract, Operand, reads, writes};
use memory::{DType, GRAIN_ELEMENTS, In, Out};

/// `out [1] (f32) = init + sum of x [n] (f32)`.
pub struct Sum<'a> {
    pub out: Out<'a>,
    pub x: In<'a>,
    pub init: Init<'a>,
}

/// `grains [ceil(n / GRAIN_ELEMENTS)] (f64)` = the sum of squares of each [`GRAIN_ELEMENTS`] elements of `x [n]` (f32
/// or bf16); the last grain may be shorter. Squares and sums are f64, in the same order for every grain and on every
/// device. So the norm has the same bits wherever gradients live and however they are divided.
pub struct NormGrains<'a> {
    pub grains: Out<'a>,
    pub x: In<'a>,
}

/// `out [2] (f32)` = the Euclidean norm and the clipping factor. The norm is the root of the sum of `grains [g]` (f64,
/// see [`NormGrains`]; there may be none). The factor is min(1, max_norm / (norm + 1e-6)), or 1 if `max_norm` is none.
/// It is NaN if the norm or `loss [1]` (f32) is not finite, so that [`super::AdamW`] skips the step. A norm whose
/// square exceeds f32 (1.8e19) counts as infinite, because the update squares gradients in f32. The order of the sum
/// depends only on g.
pub struct NormAndClip<'a> {
    pub out: Out<'a>,
    pub grains: In<'a>,
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

impl Contract for NormGrains<'_> {
    fn name(&self) -> &'static str {
        "norm_grains"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real_of_rank("x", &self.x, 1)?;
        let grains = self.x.elements().div_ceil(GRAIN_ELEMENTS);
        check.tensor("grains", &self.grains, &[grains], DType::F64)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![reads(self.x), writes(&self.grains)]
    }
}

impl Contract for NormAndClip<'_> {
    fn name(&self) -> &'static str {
        "norm_and_clip"
    }

    fn check(&self, check: &Check) -> Checked {
        check.rank("grains", &self.grains, 1)?;
        check.tensor("grains", &self.grains, self.grains.dims(), DType::F64)?;
        check.tensor("loss", &self.loss, &[1], DType::F32)?;
        check.tensor("out", &self.out, &[2], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![reads(self.grains)]
    }
}
