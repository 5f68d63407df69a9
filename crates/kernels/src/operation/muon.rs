//! What Muon needs besides matrix products: the momentum update, Newton-Schulz's sums, and the update of the weights.

use super::adamw::{MasterOperand, MomentOperand};
use super::check::{Check, Checked};
use super::contract::{Contract, Operand, changes, reads, writes};
use crate::quantise::BLOCK;
use memory::{DType, In, Out};

/// The update of a momentum: `momentum [n] = decay momentum + (1 - decay) g` for the clipped gradients g. `out [n]`
/// (f32 or bf16) is the new momentum, or, with Nesterov, `decay momentum + (1 - decay) g` of the new momentum. If the
/// clipping factor is not finite, the momentum stays as it is, and `out` is zero.
pub struct Momentum<'a> {
    pub out: Out<'a>,
    /// Read and written.
    pub momentum: MomentOperand<'a>,
    /// `[n]` f32 or bf16, before clipping.
    pub gradients: In<'a>,
    /// `[2]` f32, as in [`super::AdamW`].
    pub clip: In<'a>,
    /// `[2]` u32, as in [`super::AdamW`].
    pub key: In<'a>,
    /// As in [`super::AdamW`].
    pub first_index: u64,
    pub decay: f32,
    pub nesterov: bool,
}

/// `x [n]` (f32 or bf16) is divided by the greater of `norm [1]` (f32), rounded to x's type, and `eps`.
pub struct DivideByNorm<'a> {
    pub x: Out<'a>,
    pub norm: In<'a>,
    pub eps: f32,
}

/// `out [n] = alpha x [n] + beta out`, in f32 and rounded once to `out`'s type, f32 or bf16; `x` is f32.
pub struct Combine<'a> {
    pub out: Out<'a>,
    pub x: In<'a>,
    pub alpha: f32,
    pub beta: f32,
}

/// The update of weights along a direction (f32 or bf16). Subtracts rate x `weight_decay` x `weights [n]` first, then
/// rate x `scale` x `direction [n]`.
pub struct StepAlong<'a> {
    /// Weights `[n]`, f32 or bf16; written.
    pub parameters: Out<'a>,
    /// The exact weights; read and written.
    pub master: MasterOperand<'a>,
    pub direction: In<'a>,
    /// `[1]` f32: the learning rate.
    pub rate: In<'a>,
    /// `[2]` f32, as in [`super::AdamW`]: if the factor is not finite, nothing is changed.
    pub clip: In<'a>,
    /// `[2]` u32, as in [`super::AdamW`].
    pub key: In<'a>,
    /// As in [`super::AdamW`].
    pub first_index: u64,
    pub scale: f32,
    pub weight_decay: f32,
}

fn check_step(check: &Check, clip: &In, key: &In, first: u64) -> Checked {
    check.tensor("clip", clip, &[2], DType::F32)?;
    check.tensor("key", key, &[2], DType::U32)?;
    check.that(first.is_multiple_of(BLOCK as u64), || {
        format!("`first_index` is {first}, expected a multiple of {BLOCK}")
    })
}

impl Contract for Momentum<'_> {
    fn name(&self) -> &'static str {
        "momentum"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real_of_rank("out", &self.out, 1)?;
        let n = self.out.elements();
        self.momentum.check(check, "momentum", n)?;
        check.real("gradients", &self.gradients, &[n])?;
        check_step(check, &self.clip, &self.key, self.first_index)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let out = [writes(&self.out), reads(self.gradients)];
        out.into_iter().chain(self.momentum.operands()).collect()
    }
}

impl Contract for DivideByNorm<'_> {
    fn name(&self) -> &'static str {
        "divide_by_norm"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real_of_rank("x", &self.x, 1)?;
        check.tensor("norm", &self.norm, &[1], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![changes(&self.x)]
    }
}

impl Contract for Combine<'_> {
    fn name(&self) -> &'static str {
        "combine"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real_of_rank("out", &self.out, 1)?;
        check.tensor("x", &self.x, self.out.dims(), DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![changes(&self.out), reads(self.x)]
    }
}

impl Contract for StepAlong<'_> {
    fn name(&self) -> &'static str {
        "step_along"
    }

    fn check(&self, check: &Check) -> Checked {
        let (n, weights) = (self.parameters.elements(), self.parameters.dtype());
        check.real_of_rank("parameters", &self.parameters, 1)?;
        self.master.check(check, n, weights)?;
        check.real("direction", &self.direction, &[n])?;
        check.tensor("rate", &self.rate, &[1], DType::F32)?;
        check_step(check, &self.clip, &self.key, self.first_index)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let weights = self.master.operands(&self.parameters).into_iter();
        weights.chain([reads(self.direction)]).collect()
    }
}
