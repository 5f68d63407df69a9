//! Layer normalisation (Ba, Kiros and Hinton 2016).

use super::extent::Extent;
use super::fp8::launch_in_form;
use super::norm_backward::{ByWidth, NormBackward, norm_backward};
use super::{Cuda, Driver, arguments, kernel, kernels};
use crate::Result;
use crate::operation::{LayerNorm, LayerNormBackward};

pub(super) fn layer_norm<D: Driver>(cuda: &Cuda<D>, op: LayerNorm) -> Result {
    let kernels = kernels!(
        "layer_norm",
        "layer_norm",
        op.x.dtype(),
        "_largest",
        "_codes"
    );
    let (rows, width) = (op.x.dims()[0], op.x.dims()[1]);
    let arguments = arguments! {
        &op.y, &op.mean, &op.rstd, &op.x, &op.weight, &op.bias, rows, width, op.eps,
    };
    let extent = Extent::held_rows(rows, width);
    launch_in_form(cuda, kernels, (extent, &arguments), op.form)
}

pub(super) fn layer_norm_backward<D: Driver>(cuda: &Cuda<D>, op: LayerNormBackward) -> Result {
    let dtype = op.x.dtype();
    let of = NormBackward {
        operation: "layer_norm_backward",
        kernels: ByWidth {
            narrow: kernel!("layer_norm", "layer_norm_backward", dtype),
            wide: kernel!("layer_norm", "layer_norm_backward_wide", dtype),
            widest: kernel!("layer_norm", "layer_norm_backward_widest", dtype),
        },
        dx: (op.dx, op.dx_init),
        gradients: [(op.dweight, op.dweight_init), (op.dbias, op.dbias_init)],
        dy: op.dy,
        x: op.x,
        weight: op.weight,
        statistics: &[op.mean, op.rstd],
    };
    norm_backward(cuda, of)
}
