//! The loss of next-token prediction, with its gradient.

use super::contract::Contract;
use super::declaration::operation;
use memory::{In, Out};

operation! {
    /// Cross-entropy of `logits [t, v]` against `targets [t]` (i32; negative: masked). `losses [t]` (f32) receives each
    /// token's loss, 0 where masked; `logits` become their gradient times `scale [1]` (f32), or 1 where it is left out. It lies
    /// on the device, so that what was asked for once can be asked for again as it is.
    CrossEntropy "cross_entropy": logits [t, v] {
        losses: Out<'a> [t] f32,
        logits: Out<'a> [t, v] changes,
        targets: In<'a> [t] i32,
        scale: Option<In<'a>> [1] f32 uncounted,
    }
}

impl Contract for CrossEntropy<'_> {}
