//! The loss of preferences between pairs of sequences, with its gradient.

use super::contract::Contract;
use super::declaration::operation;
use memory::{In, Out};

operation! {
    /// Direct preference optimisation (Rafailov et al. 2023) of p pairs of sequences, the chosen one before the rejected one.
    /// `policy [2 p]` and `reference [2 p]` have the sum of each sequence's losses, its negative log-probability, under the
    /// model and under the one that it began as. The reward of a sequence is `beta (reference - policy)`, and the loss of a pair
    /// is -ln sigmoid(chosen reward - rejected reward). All are f32.
    ///
    /// `marks [4, p]` receive for each pair its loss, the rewards of the chosen and of the rejected sequence, and 1 where the
    /// chosen one's is larger, else 0. `factors [2 p]` receive the derivative of the loss by the sequence's entry of `policy`,
    /// times `scale [1]`: what the gradients of its tokens' losses are multiplied by ([`super::CrossEntropy`]).
    PreferenceLoss "preference_loss": factors, marks [_, p] {
        factors: Out<'a> [2 * p] f32,
        marks: Out<'a> [4, p] f32,
        policy: In<'a> [2 * p] f32,
        reference: In<'a> [2 * p] f32,
        scale: In<'a> [1] f32 uncounted,
        beta: f32,
    }
}

impl Contract for PreferenceLoss<'_> {}
