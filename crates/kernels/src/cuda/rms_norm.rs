//! Root-mean-square normalisation (Zhang and Sennrich 2019).

use super::extent::Extent;
use super::{Argument, Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::{Init, KernelError, check};
use memory::{DType, In, Out};

pub(super) fn rms_norm<D: Driver>(
    cuda: &Cuda<D>,
    y: Option<Out>,
    rstd: Option<Out>,
    x: In,
    weight: In,
    eps: f32,
) -> Result<(), KernelError> {
    check::rms_norm(&y, &rstd, &x, &weight)?;
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
    (dx, dx_init): (Out, Init),
    (dweight, dweight_init): (Out, Init),
    dy: In,
    x: In,
    weight: In,
    rstd: In,
) -> Result<(), KernelError> {
    let of_weight = (&dweight, &dweight_init);
    check::rms_norm_backward((&dx, &dx_init), of_weight, &dy, &x, &weight, &rstd)?;
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
