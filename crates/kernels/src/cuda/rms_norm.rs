//! Root-mean-square normalisation (Zhang and Sennrich 2019).

use super::extent::Extent;
use super::fp8::launch_finding_largest;
use super::norm_backward::{ByWidth, NormBackward, norm_backward};
use super::{Argument, Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{RmsNorm, RmsNormBackward};
use memory::DType;

pub(super) fn rms_norm<D: Driver>(cuda: &Cuda<D>, operation: RmsNorm) -> Result<(), KernelError> {
    let RmsNorm {
        y,
        rstd,
        largest,
        x,
        weight,
        eps,
    } = operation;
    let kernels = [
        kernel!("rms_norm", "rms_norm", x.dtype()),
        kernel!("rms_norm", "rms_norm_largest", x.dtype()),
    ];
    let (rows, width) = (x.dims()[0], x.dims()[1]);
    let arguments = vec![
        Argument::optional(&y),
        Argument::optional(&rstd),
        (&x).into(),
        (&weight).into(),
        rows.into(),
        width.into(),
        eps.into(),
    ];
    let extent = Extent::narrow_rows(rows, width);
    launch_finding_largest(cuda, kernels, (extent, arguments), largest)
}

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
    let dtype = x.dtype();
    let of = NormBackward {
        operation: "rms_norm_backward",
        kernels: ByWidth {
            narrow: kernel!("rms_norm", "rms_norm_backward", dtype),
            wide: kernel!("rms_norm", "rms_norm_backward_wide", dtype),
            widest: kernel!("rms_norm", "rms_norm_backward_widest", dtype),
        },
        dx: (dx, dx_init),
        gradients: [(dweight, dweight_init)],
        dy,
        x,
        weight,
        statistics: &[rstd],
    };
    norm_backward(cuda, of)
}
