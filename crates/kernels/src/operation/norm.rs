//! Sums over whole arenas: the loss of a step, and the norm of its gradients.

use super::Init;
use super::contract::Contract;
use super::declaration::operation;
use memory::{GRAIN_ELEMENTS, In, Out};

operation! {
    /// `out [1] (f32) = init + sum of x [n] (f32)`.
    Sum "sum": x [n] {
        out: Out<'a> [1] f32 uncounted,
        x: In<'a> [n] f32,
        init: Init<'a> [] in_place,
    }

    /// `grains [ceil(n / GRAIN_ELEMENTS)] (f64)` = the sum of squares of each [`GRAIN_ELEMENTS`] elements of `x [n]` (f32
    /// or bf16); the last grain may be shorter. Squares and sums are f64, in the same order for every grain and on every
    /// device. So the norm has the same bits wherever gradients live and however they are divided.
    NormGrains "norm_grains": x [n] {
        grains: Out<'a> [n.div_ceil(GRAIN_ELEMENTS)] f64,
        x: In<'a> [n],
    }

    /// `out [2] (f32)` = the Euclidean norm and the clipping factor. The norm is the root of the sum of `grains [g]` (f64,
    /// see [`NormGrains`]; there may be none). The factor is min(1, max_norm / (norm + 1e-6)), or 1 if `max_norm` is none.
    /// It is NaN if the norm or `loss [1]` (f32) is not finite, so that [`super::AdamW`] skips the step. A norm whose
    /// square exceeds f32 (1.8e19) counts as infinite, because the update squares gradients in f32. The order of the sum
    /// depends only on g.
    NormAndClip "norm_and_clip": grains [g] {
        out: Out<'a> [2] f32 uncounted,
        grains: In<'a> [g] f64,
        loss: In<'a> [1] f32 uncounted,
        max_norm: Option<f32>,
    }
}

impl Contract for Sum<'_> {}

impl Contract for NormGrains<'_> {}

impl Contract for NormAndClip<'_> {}
