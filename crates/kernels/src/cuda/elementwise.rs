//! Fill, copy, bias.

use super::extent::Extent;
use super::{Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::{Init, KernelError, check};
use memory::{DType, In, Out};

pub(super) fn fill<D: Driver>(cuda: &Cuda<D>, out: Out, value: f32) -> Result<(), KernelError> {
    check::fill(&out)?;
    let kernel = kernel!("elementwise", "fill", out.dtype());
    let n = out.elements();
    let arguments = [(&out).into(), n.into(), value.into()];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn copy<D: Driver>(cuda: &Cuda<D>, out: Out, x: In) -> Result<(), KernelError> {
    check::copy(&out, &x)?;
    let kernel = kernel!("elementwise", "copy", out.dtype(), x.dtype());
    let n = out.elements();
    let arguments = [(&out).into(), (&x).into(), n.into()];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn add_bias<D: Driver>(cuda: &Cuda<D>, out: Out, bias: In) -> Result<(), KernelError> {
    check::add_bias(&out, &bias)?;
    let kernel = kernel!("elementwise", "add_bias", out.dtype());
    let (rows, width) = (out.dims()[0], out.dims()[1]);
    let arguments = [(&out).into(), (&bias).into(), width.into()];
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}

pub(super) fn bias_backward<D: Driver>(
    cuda: &Cuda<D>,
    out: Out,
    dy: In,
    init: Init,
) -> Result<(), KernelError> {
    check::bias_backward(&out, &dy, &init)?;
    let kernel = kernel!("elementwise", "bias_backward", out.dtype(), dy.dtype());
    let (rows, width) = (dy.dims()[0], dy.dims()[1]);
    let arguments = [
        (&out).into(),
        (&dy).into(),
        rows.into(),
        width.into(),
        accumulates(&init),
    ];
    cuda.launch(kernel, Extent::columns(rows, width), &arguments)
}
