//! Layer normalisation (Ba, Kiros and Hinton 2016).

use super::columns::Columns;
use super::extent::Extent;
use super::{Argument, Cuda, Driver, Kernel, accumulates, elementwise, kernel, no_kernel};
use crate::operation::{BiasBackward, LayerNorm, LayerNormBackward};
use crate::{Init, KernelError};
use memory::{DType, In, Out};

pub(super) fn layer_norm<D: Driver>(
    cuda: &Cuda<D>,
    operation: LayerNorm,
) -> Result<(), KernelError> {
    let LayerNorm {
        y,
        mean,
        rstd,
        x,
        weight,
        bias,
        eps,
    } = operation;
    let kernel = kernel!("layer_norm", "layer_norm", x.dtype());
    let (rows, width) = (x.dims()[0], x.dims()[1]);
    let arguments = [
        Argument::optional(&y),
        Argument::optional(&mean),
        Argument::optional(&rstd),
        (&x).into(),
        (&weight).into(),
        (&bias).into(),
        rows.into(),
        width.into(),
        eps.into(),
    ];
    cuda.launch(kernel, Extent::narrow_rows(rows, width), &arguments)
}

/// The three gradients, each from its own pass over `dy`.
pub(super) fn layer_norm_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: LayerNormBackward,
) -> Result<(), KernelError> {
    let LayerNormBackward {
        dx,
        dx_init,
        dweight,
        dweight_init,
        dbias,
        dbias_init,
        dy,
        x,
        weight,
        mean,
        rstd,
    } = operation;
    weight_gradient(cuda, (dweight, dweight_init), [&dy, &x, &mean, &rstd])?;
    let of_bias = BiasBackward {
        out: dbias,
        dy,
        init: dbias_init,
    };
    elementwise::bias_backward(cuda, of_bias)?;
    let kernel = kernel!("layer_norm", "layer_norm_backward", x.dtype());
    let (rows, width) = (x.dims()[0], x.dims()[1]);
    let arguments = [
        (&dx).into(),
        (&dy).into(),
        (&x).into(),
        (&weight).into(),
        (&mean).into(),
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
    [dy, x, mean, rstd]: [&In; 4],
) -> Result<(), KernelError> {
    let columns = Columns::new(cuda, "layer_norm_backward", x.dims()[0], x.dims()[1])?;
    let [rows, part_rows, width] = columns.sizes();
    let arguments = [
        Columns::place(cuda),
        dy.into(),
        x.into(),
        mean.into(),
        rstd.into(),
        rows,
        part_rows,
        width,
    ];
    let kernel = kernel!("layer_norm", "layer_norm_dweight", x.dtype());
    columns.sum(cuda, kernel, &arguments, dweight)
}
