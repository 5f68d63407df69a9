//! The loss of next-token prediction, with its gradient, and the cap of logits.

use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::{operation, size};
use memory::{In, Out};

operation! {
    /// Cross-entropy of `logits [t, v]` against `targets [t]` (i32; negative: masked). `losses [t]` (f32) receives each
    /// token's loss, 0 where masked; `logits` become their gradient times `scale` (f32), `[1]` for all tokens or `[t]` for each, or 1 where
    /// it is left out. It lies on the device, so that what was asked for once can be asked for again as it is. With a `cap` the loss is that of
    /// cap tanh(logits / cap), in f32, and the gradient is that of `logits` all the same.
    CrossEntropy "cross_entropy": logits [t, v] {
        losses: Out<'a> [t] f32,
        logits: Out<'a> [t, v] changes,
        targets: In<'a> [t] i32,
        scale: Option<In<'a>> [if size(scale.as_ref(), 0) == 1 { 1 } else { t }] f32 uncounted,
        cap: Option<f32>,
    }

    /// `x = cap tanh(x / cap)` in place, of any shape: logits from which tokens are drawn.
    SoftCap "soft_cap": x {
        x: Out<'a> [..x] changes,
        cap: f32,
    }
}

impl Contract for CrossEntropy<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.cap.map_or(Ok(()), |cap| check.positive("cap", cap))
    }
}

impl Contract for SoftCap<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        check.positive("cap", self.cap)
    }
}
