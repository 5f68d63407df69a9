//! What Muon needs besides matrix products: the momentum update, Newton-Schulz's sums, and the update of the weights.

use super::adamw::{MasterOperand, MomentOperand};
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use memory::{In, Out};

operation! {
    /// The update of a momentum: `momentum [n] = decay momentum + (1 - decay) g` for the clipped gradients g. `out [n]`
    /// (f32 or bf16) is the new momentum, or, with Nesterov, `decay momentum + (1 - decay) g` of the new momentum. If the
    /// clipping factor is not finite, the momentum stays as it is, and `out` is zero.
    Momentum "momentum": out [n] {
        out: Out<'a> [n] real,
        /// Read and written.
        momentum: MomentOperand<'a> [n] real changes,
        /// Before clipping.
        gradients: In<'a> [n] real,
        /// As in [`super::AdamW`].
        clip: In<'a> [2] f32 uncounted,
        /// As in [`super::AdamW`].
        key: In<'a> [2] u32 uncounted,
        /// As in [`super::AdamW`].
        first_index: u64,
        decay: f32,
        nesterov: bool,
    }

    /// `x [n]` (f32 or bf16) is divided by the greater of `norm [1]` (f32), rounded to x's type, and `eps`.
    DivideByNorm "divide_by_norm": x [n] {
        x: Out<'a> [n] changes,
        norm: In<'a> [1] f32 uncounted,
        eps: f32,
    }

    /// `out [n] = alpha x [n] + beta out`, in f32 and rounded once to `out`'s type, f32 or bf16; `x` is f32.
    Combine "combine": out [n] {
        out: Out<'a> [n] changes,
        x: In<'a> [n] f32,
        alpha: f32,
        beta: f32,
    }

    /// The update of weights along a direction (f32 or bf16). Subtracts rate x `weight_decay` x `weights [n]` first, then
    /// rate x `scale` x `direction [n]`.
    StepAlong "step_along": parameters [n] {
        /// The weights; written.
        parameters: Out<'a> [n] real used(master.access()),
        /// The exact weights; read and written.
        master: MasterOperand<'a> [n] f32 changes,
        direction: In<'a> [n] real,
        /// The learning rate.
        rate: In<'a> [1] f32 uncounted,
        /// As in [`super::AdamW`]: if the factor is not finite, nothing is changed.
        clip: In<'a> [2] f32 uncounted,
        /// As in [`super::AdamW`].
        key: In<'a> [2] u32 uncounted,
        /// As in [`super::AdamW`].
        first_index: u64,
        scale: f32,
        weight_decay: f32,
    }
}

impl Contract for Momentum<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.first("first_index", self.first_index)
    }
}

impl Contract for DivideByNorm<'_> {}

impl Contract for Combine<'_> {}

impl Contract for StepAlong<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        self.master.check(check, self.parameters.dtype())?;
        check.first("first_index", self.first_index)
    }
}
