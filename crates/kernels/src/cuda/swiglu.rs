//! Gated feed-forward activation (Shazeer 2020).

use super::extent::Extent;
use super::{Cuda, Driver, Kernel, kernel, no_kernel};
use crate::{KernelError, check};
use memory::{DType, In, Out};

pub(super) fn swiglu<D: Driver>(
    cuda: &Cuda<D>,
    act: Out,
    gate: In,
    up: In,
) -> Result<(), KernelError> {
    check::swiglu(&act, &gate, &up)?;
    let kernel = kernel!("swiglu", "swiglu", act.dtype());
    let n = act.elements();
    let arguments = [(&act).into(), (&gate).into(), (&up).into(), n.into()];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn swiglu_backward<D: Driver>(
    cuda: &Cuda<D>,
    gate: Out,
    up: Out,
    dact: In,
) -> Result<(), KernelError> {
    check::swiglu_backward(&gate, &up, &dact)?;
    let kernel = kernel!("swiglu", "swiglu_backward", gate.dtype());
    let n = gate.elements();
    let arguments = [(&gate).into(), (&up).into(), (&dact).into(), n.into()];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}
