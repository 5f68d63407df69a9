//! Root-mean-square normalisation (Zhang and Sennrich 2019).

use super::columns::Columns;
use super::extent::Extent;
use super::{Argument, Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::operation::{RmsNorm, RmsNormBackward};
use crate::{Init, KernelError};
use memory::{DType, In, Out};

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
        rows.into(),
        width.into(),
        eps.into(),
    ];
    cuda.launch(kernel, Extent::narrow_rows(rows, width), &arguments)
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
    weight_gradient(cuda, (dweight, dweight_init), [&dy, &x, &rstd])?;
    let kernel = kernel!("rms_norm", "rms_norm_backward", x.dtype());
    let arguments = [
        (&dx).into(),
        (&dy).into(),
        (&x).into(),
        (&weight).into(),
        (&rstd).into(),
        rows.into(),
        width.into(),
        accumulates(&dx_init),
    ];
    cuda.launch(kernel, Extent::narrow_rows(rows, width), &arguments)
}

fn weight_gradient<D: Driver>(
    cuda: &Cuda<D>,
    dweight: (Out, Init),
    [dy, x, rstd]: [&In; 3],
) -> Result<(), KernelError> {
    let columns = Columns::new(cuda, "rms_norm_backward", x.dims()[0], x.dims()[1])?;
    let [rows, part_rows, width] = columns.sizes();
    let arguments = [
        Columns::place(cuda),
        dy.into(),
        x.into(),
        rstd.into(),
        rows,
        part_rows,
        width,
    ];
    let kernel = kernel!("rms_norm", "rms_norm_dweight", x.dtype());
    columns.sum(cuda, kernel, &arguments, dweight)
}
