//! Gated feed-forward activation (Shazeer 2020).

use super::extent::Extent;
use super::{Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{Swiglu, SwigluBackward};
use memory::DType;

pub(super) fn swiglu<D: Driver>(
    cuda: &Cuda<D>,
    Swiglu { act, gate, up }: Swiglu,
) -> Result<(), KernelError> {
    let kernel = kernel!("swiglu", "swiglu", act.dtype());
    let n = act.elements();
    let arguments = [(&act).into(), (&gate).into(), (&up).into(), n.into()];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn swiglu_backward<D: Driver>(
    cuda: &Cuda<D>,
    SwigluBackward { gate, up, dact }: SwigluBackward,
) -> Result<(), KernelError> {
    let kernel = kernel!("swiglu", "swiglu_backward", gate.dtype());
    let n = gate.elements();
    let arguments = [(&gate).into(), (&up).into(), (&dact).into(), n.into()];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}
