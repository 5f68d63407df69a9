//! Gaussian error linear unit (Hendrycks and Gimpel 2016), in its form with a tanh.

use super::extent::Extent;
use super::fp8::{launch_finding_largest, launch_in_form};
use super::{Cuda, Driver, arguments, kernels};
use crate::Result;
use crate::operation::{Gelu, GeluBackward};

pub(super) fn gelu<D: Driver>(cuda: &Cuda<D>, op: Gelu) -> Result {
    let kernels = kernels!("gelu", "gelu", op.x.dtype(), "_largest", "_codes");
    let n = op.x.elements();
    let arguments = arguments![&op.act, &op.x, n];
    launch_in_form(cuda, kernels, (Extent::flat(n), &arguments), op.form)
}

pub(super) fn gelu_backward<D: Driver>(cuda: &Cuda<D>, op: GeluBackward) -> Result {
    let kernels = kernels!("gelu", "gelu_backward", op.dact.dtype(), "_largest");
    let n = op.dact.elements();
    let arguments = arguments![&op.x, &op.dact, n];
    launch_finding_largest(cuda, kernels, (Extent::flat(n), &arguments), op.largest)
}
