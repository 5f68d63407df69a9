//! Gaussian error linear unit (Hendrycks and Gimpel 2016), in its form with a tanh.

use super::extent::Extent;
use super::{Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{Gelu, GeluBackward};
use memory::DType;

pub(super) fn gelu<D: Driver>(cuda: &Cuda<D>, Gelu { act, x }: Gelu) -> Result<(), KernelError> {
    let kernel = kernel!("gelu", "gelu", act.dtype());
    let n = act.elements();
    cuda.launch(
        kernel,
        Extent::flat(n),
        &[(&act).into(), (&x).into(), n.into()],
    )
}

pub(super) fn gelu_backward<D: Driver>(
    cuda: &Cuda<D>,
    GeluBackward { x, dact }: GeluBackward,
) -> Result<(), KernelError> {
    let kernel = kernel!("gelu", "gelu_backward", x.dtype());
    let n = x.elements();
    cuda.launch(
        kernel,
        Extent::flat(n),
        &[(&x).into(), (&dact).into(), n.into()],
    )
}
