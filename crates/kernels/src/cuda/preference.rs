//! The loss of preferences, with its gradient.

use super::extent::Extent;
use super::{Cuda, Driver, arguments, kernel};
use crate::Result;
use crate::operation::PreferenceLoss;

pub(super) fn preference_loss<D: Driver>(cuda: &Cuda<D>, op: PreferenceLoss) -> Result {
    let pairs = op.marks.dims()[1];
    let arguments = arguments! {
        &op.factors, &op.marks, &op.policy, &op.reference, &op.scale, op.beta, pairs,
    };
    let kernel = kernel!("preference", "preference_loss_f32");
    cuda.launch(kernel, Extent::lanes(pairs, 1), &arguments)
}
