//! Root-mean-square normalisation (Zhang and Sennrich 2019).

use super::extent::Extent;
use super::fp8::launch_in_form;
use super::norm_backward::{ByWidth, NormBackward, norm_backward};
use super::{Cuda, Driver, arguments, kernels};
use crate::Result;
use crate::operation::{RmsNorm, RmsNormBackward};

pub(super) fn rms_norm<D: Driver>(cuda: &Cuda<D>, op: RmsNorm) -> Result {
    let dtype = op.x.dtype();
    let kernels = match op.plus_one {
        false => kernels!("rms_norm", "rms_norm", dtype, "_largest", "_codes"),
        true => kernels!("rms_norm", "rms_norm_plus_one", dtype, "_largest", "_codes"),
    };
    let (rows, width) = (op.x.dims()[0], op.x.dims()[1]);
    let arguments = arguments![&op.y, &op.rstd, &op.x, &op.weight, rows, width, op.eps];
    let extent = Extent::held_rows(rows, width);
    launch_in_form(cuda, kernels, (extent, &arguments), op.form)
}

pub(super) fn rms_norm_backward<D: Driver>(cuda: &Cuda<D>, op: RmsNormBackward) -> Result {
    let dtype = op.x.dtype();
    let [narrow, wide, widest] = match op.plus_one {
        false => kernels!("rms_norm", "rms_norm_backward", dtype, "_wide", "_widest"),
        true => kernels!(
            "rms_norm",
            "rms_norm_plus_one_backward",
            dtype,
            "_wide",
            "_widest"
        ),
    };
    let of = NormBackward {
        operation: "rms_norm_backward",
        kernels: ByWidth {
            narrow,
            wide,
            widest,
        },
        dx: (op.dx, op.dx_init),
        gradients: [(op.dweight, op.dweight_init)],
        dy: op.dy,
        x: op.x,
        weight: op.weight,
        statistics: &[op.rstd],
    };
    norm_backward(cuda, of)
}
