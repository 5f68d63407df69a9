//! Gated feed-forward activation (Shazeer 2020).

use super::extent::Extent;
use super::fp8::{launch_finding_largest, launch_in_form};
use super::{Cuda, Driver, arguments, kernels};
use crate::Result;
use crate::operation::{Swiglu, SwigluBackward};

/// Threads of a block, each for a pack of a row.
const THREADS: usize = 128;

pub(super) fn swiglu<D: Driver>(cuda: &Cuda<D>, op: Swiglu) -> Result {
    let (rows, width) = (op.act.dims()[0], op.act.dims()[1]);
    let kernels = kernels!("swiglu", "swiglu", op.gate_up.dtype(), "_largest", "_codes");
    let arguments = arguments![&op.act, &op.gate_up, width];
    let extent = Extent::rows_by_columns(rows, width, THREADS);
    launch_in_form(cuda, kernels, (extent, &arguments), op.form)
}

pub(super) fn swiglu_backward<D: Driver>(cuda: &Cuda<D>, op: SwigluBackward) -> Result {
    let (rows, width) = (op.dact.dims()[0], op.dact.dims()[1]);
    let kernels = kernels!("swiglu", "swiglu_backward", op.dact.dtype(), "_largest");
    let arguments = arguments![&op.gate_up, &op.dact, width];
    let extent = Extent::rows_by_columns(rows, width, THREADS);
    launch_finding_largest(cuda, kernels, (extent, &arguments), op.largest)
}
