//! Gated feed-forward activation (Shazeer 2020).

use super::extent::Extent;
use super::{Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{Swiglu, SwigluBackward};
use memory::DType;

/// Threads of a block, each for a pack of a row.
const THREADS: usize = 128;

pub(super) fn swiglu<D: Driver>(
    cuda: &Cuda<D>,
    Swiglu { act, gate_up }: Swiglu,
) -> Result<(), KernelError> {
    let kernel = kernel!("swiglu", "swiglu", act.dtype());
    let (rows, width) = (act.dims()[0], act.dims()[1]);
    let arguments = [(&act).into(), (&gate_up).into(), width.into()];
    cuda.launch(
        kernel,
        Extent::rows_by_columns(rows, width, THREADS),
        &arguments,
    )
}

pub(super) fn swiglu_backward<D: Driver>(
    cuda: &Cuda<D>,
    SwigluBackward { gate_up, dact }: SwigluBackward,
) -> Result<(), KernelError> {
    let kernel = kernel!("swiglu", "swiglu_backward", dact.dtype());
    let (rows, width) = (dact.dims()[0], dact.dims()[1]);
    let arguments = [(&gate_up).into(), (&dact).into(), width.into()];
    cuda.launch(
        kernel,
        Extent::rows_by_columns(rows, width, THREADS),
        &arguments,
    )
}
