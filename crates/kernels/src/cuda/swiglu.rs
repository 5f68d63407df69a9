//! Gated feed-forward activation (Shazeer 2020).

use super::extent::Extent;
use super::fp8::{launch_finding_largest, launch_in_form};
use super::{Cuda, Driver, arguments, kernels};
use crate::Result;
use crate::operation::{GateFunction, GatedActivation, GatedActivationBackward};

/// Threads of a block, each for a pack of a row.
const THREADS: usize = 128;

/// A choice of kernels by the function of the gate: names begin as given, and go on with the function and the ending.
macro_rules! by_function {
    ($choose:ident!($function:expr, $source:literal, $start:literal, $end:literal) $(, $more:expr)*) => {
        match $function {
            GateFunction::Silu => $choose!($source, concat!($start, "swiglu", $end) $(, $more)*),
            GateFunction::GeluTanh => $choose!($source, concat!($start, "geglu", $end) $(, $more)*),
            GateFunction::ClampedSwish { .. } => {
                $choose!($source, concat!($start, "clamped", $end) $(, $more)*)
            }
        }
    };
}
pub(super) use by_function;

pub(super) fn gated_activation<D: Driver>(cuda: &Cuda<D>, op: GatedActivation) -> Result {
    let (rows, width) = (op.act.dims()[0], op.act.dims()[1]);
    let dtype = op.gate_up.dtype();
    let kernels = by_function!(
        kernels!(op.function, "swiglu", "", ""),
        dtype,
        "_largest",
        "_codes"
    );
    let [alpha, limit] = op.function.alpha_and_limit();
    let arguments = arguments![&op.act, &op.gate_up, width, alpha, limit];
    let extent = Extent::rows_by_columns(rows, width, THREADS);
    launch_in_form(cuda, kernels, (extent, &arguments), op.form)
}

pub(super) fn gated_activation_backward<D: Driver>(
    cuda: &Cuda<D>,
    op: GatedActivationBackward,
) -> Result {
    let (rows, width) = (op.dact.dims()[0], op.dact.dims()[1]);
    let dtype = op.dact.dtype();
    let kernels = by_function!(
        kernels!(op.function, "swiglu", "", "_backward"),
        dtype,
        "_largest"
    );
    let [alpha, limit] = op.function.alpha_and_limit();
    let arguments = arguments![&op.gate_up, &op.dact, width, alpha, limit];
    let extent = Extent::rows_by_columns(rows, width, THREADS);
    launch_finding_largest(cuda, kernels, (extent, &arguments), op.largest)
}
