//! Root-mean-square normalisation (Zhang and Sennrich 2019).

use super::extent::Extent;
use super::{Argument, Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{RmsNorm, RmsNormBackward};
use memory::DType;

pub(super) fn rms_norm<D: Driver>(cuda: &Cuda<D>, operation: RmsNorm) -> Result<(), KernelError> {
    let RmsNorm {
        y,
        rstd,
        x,
        weight,
        eps,
    } = operation;
    let kernel = kernel!("rms_norm", "rms_norm", x.dtype());
    let (rows, width) = (x.dims()[0], x.dims()[1]);
    let arguments = [
        Argument::optional(&y),
        Argument::optional(&rstd),
        (&x).into(),
        (&weight).into(),
        width.into(),
        eps.into(),
    ];
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}

/// Both gradients, each from its own pass over `dy` and `x`.
pub(super) fn rms_norm_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: RmsNormBackward,
) -> Result<(), KernelError> {
    let RmsNormBackward {
        dx,
        dx_init,
        dweight,
        dweight_init,
        dy,
        x,
        weight,
        rstd,
    } = operation;
    let (rows, width) = (x.dims()[0], x.dims()[1]);
    let kernel = kernel!("rms_norm", "rms_norm_dweight", dweight.dtype(), x.dtype());
    let arguments = [
        (&dweight).into(),
        (&dy).into(),
        (&x).into(),
        (&rstd).into(),
        rows.into(),
        width.into(),
        accumulates(&dweight_init),
    ];
    cuda.launch(kernel, Extent::columns(rows, width), &arguments)?;
    let kernel = kernel!("rms_norm", "rms_norm_backward", x.dtype());
    let arguments = [
        (&dx).into(),
        (&dy).into(),
        (&x).into(),
        (&weight).into(),
        (&rstd).into(),
        width.into(),
        accumulates(&dx_init),
    ];
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}
