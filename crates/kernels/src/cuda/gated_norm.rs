//! The gated norm behind the gated delta rule.

use super::columns::Parts;
use super::extent::{Extent, WARP};
use super::short_convolution::{PARTING, THREADS};
use super::{Cuda, Driver, arguments, kernel};
use crate::Result;
use crate::operation::{GatedNorm, GatedNormBackward};

/// A warp for each row of a head.
fn warps_of_rows(tokens: usize, heads: usize) -> Extent {
    let at_a_time = THREADS / WARP;
    Extent::new([tokens.div_ceil(at_a_time), heads, 1], [WARP, at_a_time, 1])
}

pub(super) fn gated_norm<D: Driver>(cuda: &Cuda<D>, op: GatedNorm) -> Result {
    let ([tokens, width], head) = ([0, 1].map(|dim| op.x.dims()[dim]), op.weight.elements());
    let (heads, kernel) = (
        width / head,
        kernel!("gated_norm", "gated_norm", op.x.dtype()),
    );
    let arguments = arguments! {
        &op.y, &op.rstd, &op.x, &op.z, op.z.strides()[0], &op.weight, tokens, heads, head, op.eps,
    };
    cuda.launch(kernel, warps_of_rows(tokens, heads), &arguments)
}

pub(super) fn gated_norm_backward<D: Driver>(cuda: &Cuda<D>, op: GatedNormBackward) -> Result {
    let ([tokens, width], head) = ([0, 1].map(|dim| op.x.dims()[dim]), op.weight.elements());
    let (heads, rows) = (width / head, tokens * (width / head));
    let kernel = kernel!("gated_norm", "gated_norm_backward", op.x.dtype());
    let arguments = arguments! {
        &op.dx, &op.dz, op.dz.strides()[0], &op.dy, &op.x, &op.z, op.z.strides()[0], &op.weight, &op.rstd, tokens, heads, head,
    };
    cuda.launch(kernel, warps_of_rows(tokens, heads), &arguments)?;
    let parts = Parts::new(cuda, "gated_norm_backward", [rows, head], 1, PARTING)?;
    let kernel = kernel!("gated_norm", "gated_norm_dweight", op.x.dtype());
    let arguments = arguments! {
        parts.place(cuda, 0), &op.dy, &op.x, &op.z, op.z.strides()[0], &op.rstd, rows, parts.part_rows(), heads, head,
    };
    let extent = Extent::columns(parts.part_rows().min(rows), head, parts.count());
    cuda.launch(kernel, extent, &arguments)?;
    parts.add(cuda, 0, (op.dweight.into(), op.init))
}
