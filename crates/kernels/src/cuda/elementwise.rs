//! Fill, copy, bias.

use super::columns::{Parting, Parts};
use super::extent::Extent;
use super::{Cuda, Driver, arguments, kernel};
use crate::Result;
use crate::operation::{self, AddBias, BiasBackward, Fill};

pub(super) fn fill<D: Driver>(cuda: &Cuda<D>, Fill { out, value }: Fill) -> Result {
    let kernel = kernel!("elementwise", "fill", out.dtype());
    let n = out.elements();
    let arguments = arguments![&out, n, value];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn copy<D: Driver>(
    cuda: &Cuda<D>,
    operation::Copy { out, x }: operation::Copy,
) -> Result {
    let n = out.elements();
    if !(out.is_contiguous() && x.is_contiguous()) {
        let kernel = kernel!("elementwise", "copy_rows", out.dtype(), x.dtype());
        let [out_stride, x_stride] = [out.strides()[0], x.strides()[0]];
        let (rows, width) = (out.dims()[0], out.dims()[1]);
        let arguments = arguments![&out, out_stride, &x, x_stride, width];
        return cuda.launch(kernel, Extent::rows(rows, width), &arguments);
    }
    let kernel = kernel!("elementwise", "copy", out.dtype(), x.dtype());
    let arguments = arguments![&out, &x, n];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn add_bias<D: Driver>(cuda: &Cuda<D>, AddBias { out, bias }: AddBias) -> Result {
    let kernel = kernel!("elementwise", "add_bias", out.dtype());
    let (rows, width) = (out.dims()[0], out.dims()[1]);
    let stride = out.strides()[0];
    let arguments = arguments![&out, stride, &bias, width];
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}

/// Fewest rows of a part: some for each thread of a block. There are enough parts for every multiprocessor, but with
/// few columns no more than can be added quickly.
const PART_ROWS_MIN: usize = 256;
const BLOCKS_MIN: usize = 1024;
const PARTS_MAX: usize = 256;

pub(super) fn bias_backward<D: Driver>(
    cuda: &Cuda<D>,
    BiasBackward { out, dy, init }: BiasBackward,
) -> Result {
    let (rows, width) = (dy.dims()[0], dy.dims()[1]);
    let parting = Parting {
        rows_min: PART_ROWS_MIN,
        rows_multiple: 1,
        parts_max: BLOCKS_MIN
            .div_ceil(Extent::column_blocks(width).max(1))
            .min(PARTS_MAX),
    };
    let parts = Parts::new(cuda, "bias_backward", [rows, width], 1, parting)?;
    let arguments = arguments! {
        parts.place(cuda, 0), &dy, dy.strides()[0], rows, parts.part_rows(), width,
    };
    let kernel = kernel!("elementwise", "bias_backward", dy.dtype());
    let extent = Extent::columns(parts.part_rows().min(rows), width, parts.count());
    cuda.launch(kernel, extent, &arguments)?;
    parts.add(cuda, 0, (out, init))
}
