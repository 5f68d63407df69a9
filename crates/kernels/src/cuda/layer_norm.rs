//! Layer normalisation (Ba, Kiros and Hinton 2016).

use super::extent::Extent;
use super::fp8::launch_finding_largest;
use super::norm_backward::{ByWidth, NormBackward, norm_backward};
use super::{Argument, Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{LayerNorm, LayerNormBackward};
use memory::DType;

pub(super) fn layer_norm<D: Driver>(
    cuda: &Cuda<D>,
    operation: LayerNorm,
) -> Result<(), KernelError> {
    let LayerNorm {
        y,
        mean,
        rstd,
        largest,
        x,
        weight,
        bias,
        eps,
    } = operation;
    let kernels = [
        kernel!("layer_norm", "layer_norm", x.dtype()),
        kernel!("layer_norm", "layer_norm_largest", x.dtype()),
    ];
    let (rows, width) = (x.dims()[0], x.dims()[1]);
    let arguments = vec![
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
    let extent = Extent::narrow_rows(rows, width);
    launch_finding_largest(cuda, kernels, (extent, arguments), largest)
}

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
    let dtype = x.dtype();
    let of = NormBackward {
        operation: "layer_norm_backward",
        kernels: ByWidth {
            narrow: kernel!("layer_norm", "layer_norm_backward", dtype),
            wide: kernel!("layer_norm", "layer_norm_backward_wide", dtype),
            widest: kernel!("layer_norm", "layer_norm_backward_widest", dtype),
        },
        dx: (dx, dx_init),
        gradients: [(dweight, dweight_init), (dbias, dbias_init)],
        dy,
        x,
        weight,
        statistics: &[mean, rstd],
    };
    norm_backward(cuda, of)
}
