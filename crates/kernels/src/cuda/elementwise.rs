//! Fill, copy, bias.

use super::columns::Columns;
use super::extent::Extent;
use super::{Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{self, AddBias, BiasBackward, Fill};
use memory::DType;

pub(super) fn fill<D: Driver>(
    cuda: &Cuda<D>,
    Fill { out, value }: Fill,
) -> Result<(), KernelError> {
    let kernel = kernel!("elementwise", "fill", out.dtype());
    let n = out.elements();
    let arguments = [(&out).into(), n.into(), value.into()];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn copy<D: Driver>(
    cuda: &Cuda<D>,
    operation::Copy { out, x }: operation::Copy,
) -> Result<(), KernelError> {
    let kernel = kernel!("elementwise", "copy", out.dtype(), x.dtype());
    let n = out.elements();
    let arguments = [(&out).into(), (&x).into(), n.into()];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn add_bias<D: Driver>(
    cuda: &Cuda<D>,
    AddBias { out, bias }: AddBias,
) -> Result<(), KernelError> {
    let kernel = kernel!("elementwise", "add_bias", out.dtype());
    let (rows, width) = (out.dims()[0], out.dims()[1]);
    let stride = out.strides()[0];
    let arguments = [(&out).into(), stride.into(), (&bias).into(), width.into()];
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}

pub(super) fn bias_backward<D: Driver>(
    cuda: &Cuda<D>,
    BiasBackward { out, dy, init }: BiasBackward,
) -> Result<(), KernelError> {
    let columns = Columns::new(cuda, "bias_backward", dy.dims()[0], dy.dims()[1])?;
    let [rows, part_rows, width] = columns.sizes();
    let stride = dy.strides()[0].into();
    let place = Columns::place(cuda);
    let arguments = [place, (&dy).into(), stride, rows, part_rows, width];
    let kernel = kernel!("elementwise", "bias_backward", dy.dtype());
    columns.sum(cuda, kernel, &arguments, (out, init))
}
