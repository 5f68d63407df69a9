//! Gated feed-forward activation (Shazeer 2020).

use super::extent::Extent;
use super::fp8::launch_finding_largest;
use super::{Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{Swiglu, SwigluBackward};
use memory::DType;

/// Threads of a block, each for a pack of a row.
const THREADS: usize = 128;

pub(super) fn swiglu<D: Driver>(cuda: &Cuda<D>, operation: Swiglu) -> Result<(), KernelError> {
    let Swiglu {
        act,
        gate_up,
        largest,
    } = operation;
    let (rows, width) = (act.dims()[0], act.dims()[1]);
    let kernels = [
        kernel!("swiglu", "swiglu", act.dtype()),
        kernel!("swiglu", "swiglu_largest", act.dtype()),
    ];
    let arguments = vec![(&act).into(), (&gate_up).into(), width.into()];
    let extent = Extent::rows_by_columns(rows, width, THREADS);
    launch_finding_largest(cuda, kernels, (extent, arguments), largest)
}

pub(super) fn swiglu_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: SwigluBackward,
) -> Result<(), KernelError> {
    let SwigluBackward {
        gate_up,
        dact,
        largest,
    } = operation;
    let (rows, width) = (dact.dims()[0], dact.dims()[1]);
    let kernels = [
        kernel!("swiglu", "swiglu_backward", dact.dtype()),
        kernel!("swiglu", "swiglu_backward_largest", dact.dtype()),
    ];
    let arguments = vec![(&gate_up).into(), (&dact).into(), width.into()];
    let extent = Extent::rows_by_columns(rows, width, THREADS);
    launch_finding_largest(cuda, kernels, (extent, arguments), largest)
}
