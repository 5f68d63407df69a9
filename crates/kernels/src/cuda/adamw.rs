//! AdamW with f32 moments, on f32 weights or on bf16 weights with an f32 master.

use super::extent::Extent;
use super::{Argument, Cuda, Driver, Kernel, kernel};
use crate::{AdamW, KernelError, check};

pub(super) fn adamw<D: Driver>(cuda: &Cuda<D>, update: AdamW) -> Result<(), KernelError> {
    check::adamw(&update)?;
    let n = update.parameters.elements();
    // What is updated, and what receives it rounded.
    let (master, rounded) = match update.master {
        Some(master) => (master, Some(update.parameters)),
        None => (update.parameters, None),
    };
    let arguments = [
        Argument::optional(&rounded),
        (&master).into(),
        (&update.first_moment).into(),
        (&update.second_moment).into(),
        (&update.gradients).into(),
        (&update.rates).into(),
        (&update.clip).into(),
        update.beta1.into(),
        update.beta2.into(),
        update.eps.into(),
        update.weight_decay.into(),
        n.into(),
    ];
    cuda.launch(kernel!("adamw", "adamw_f32"), Extent::flat(n), &arguments)
}
