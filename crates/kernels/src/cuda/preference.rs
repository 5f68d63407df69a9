//! The loss of preferences, with its gradient.

use super::extent::Extent;
use super::{Cuda, Driver, Kernel, kernel};
use crate::KernelError;
use crate::operation::PreferenceLoss;

pub(super) fn preference_loss<D: Driver>(
    cuda: &Cuda<D>,
    operation: PreferenceLoss,
) -> Result<(), KernelError> {
    let PreferenceLoss {
        factors,
        marks,
        policy,
        reference,
        scale,
        beta,
    } = operation;
    let pairs = marks.dims()[1];
    let arguments = [
        (&factors).into(),
        (&marks).into(),
        (&policy).into(),
        (&reference).into(),
        (&scale).into(),
        beta.into(),
        pairs.into(),
    ];
    let kernel = kernel!("preference", "preference_loss_f32");
    cuda.launch(kernel, Extent::lanes(pairs, 1), &arguments)
}
