//! Gaussian error linear unit (Hendrycks and Gimpel 2016), in its form with a tanh.

use super::extent::Extent;
use super::fp8::launch_finding_largest;
use super::{Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{Gelu, GeluBackward};
use memory::DType;

pub(super) fn gelu<D: Driver>(cuda: &Cuda<D>, operation: Gelu) -> Result<(), KernelError> {
    let Gelu { act, x, largest } = operation;
    let kernels = [
        kernel!("gelu", "gelu", x.dtype()),
        kernel!("gelu", "gelu_largest", x.dtype()),
    ];
    let n = x.elements();
    let arguments = vec![(&act).into(), (&x).into(), n.into()];
    launch_finding_largest(cuda, kernels, (Extent::flat(n), arguments), largest)
}

pub(super) fn gelu_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: GeluBackward,
) -> Result<(), KernelError> {
    let GeluBackward { x, dact, largest } = operation;
    let kernels = [
        kernel!("gelu", "gelu_backward", dact.dtype()),
        kernel!("gelu", "gelu_backward_largest", dact.dtype()),
    ];
    let n = dact.elements();
    let arguments = vec![(&x).into(), (&dact).into(), n.into()];
    launch_finding_largest(cuda, kernels, (Extent::flat(n), arguments), largest)
}
