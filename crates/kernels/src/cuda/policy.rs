//! The loss of a policy gradient, with its gradient.

use super::extent::Extent;
use super::{Cuda, Driver, arguments, kernel};
use crate::Result;
use crate::operation::PolicyGradientLoss;

pub(super) fn policy_loss<D: Driver>(cuda: &Cuda<D>, op: PolicyGradientLoss) -> Result {
    let [rows, seq] = [op.factors.dims()[0], op.factors.dims()[1]];
    let arguments = arguments! {
        &op.factors, &op.marks, &op.losses, &op.old, &op.reference, &op.advantages, &op.weights, op.clip_low, op.clip_high, op.beta,
        op.by_sequence, rows, seq,
    };
    let kernel = kernel!("policy", "policy_loss_f32");
    cuda.launch(kernel, Extent::rows(rows, seq), &arguments)
}
