//! Fill, copy, bias.

use super::columns::{Parting, Parts, places};
use super::extent::Extent;
use super::{Cuda, Driver, arguments, int, kernel};
use crate::Result;
use crate::operation::{self, AddBias, BiasBackward, Fill};

pub(super) fn fill<D: Driver>(cuda: &Cuda<D>, Fill { out, value }: Fill) -> Result {
    let kernel = kernel!("elementwise", "fill", out.dtype());
    let n = out.elements();
    cuda.launch(kernel, Extent::flat(n), &arguments![&out, n, value])
}

pub(super) fn copy<D: Driver>(cuda: &Cuda<D>, op: operation::Copy) -> Result {
    let n = op.out.elements();
    if !(op.out.is_contiguous() && op.x.is_contiguous()) {
        let kernel = kernel!("elementwise", "copy_rows", op.out.dtype(), op.x.dtype());
        let [out_stride, x_stride] = [op.out.strides()[0], op.x.strides()[0]];
        let (rows, width) = (op.out.dims()[0], op.out.dims()[1]);
        let arguments = arguments![&op.out, out_stride, &op.x, x_stride, width];
        return cuda.launch(kernel, Extent::rows(rows, width), &arguments);
    }
    let kernel = kernel!("elementwise", "copy", op.out.dtype(), op.x.dtype());
    cuda.launch(kernel, Extent::flat(n), &arguments![&op.out, &op.x, n])
}

pub(super) fn add_bias<D: Driver>(cuda: &Cuda<D>, AddBias { out, bias }: AddBias) -> Result {
    let kernel = kernel!("elementwise", "add_bias", out.dtype());
    let (rows, width) = (out.dims()[0], out.dims()[1]);
    let ([first, second, third], columns) = places(&bias);
    let [first_width, second_width, third_width] = columns.map(|columns| int(columns.len()));
    let arguments = arguments! {
        &out, out.strides()[0], first, second, third, first_width, second_width, third_width,
    };
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}

/// Fewest rows of a part: some for each thread of a block. There are enough parts for every multiprocessor, but with
/// few columns no more than can be added quickly.
const PART_ROWS_MIN: usize = 256;
const BLOCKS_MIN: usize = 1024;
const PARTS_MAX: usize = 256;

pub(super) fn bias_backward<D: Driver>(cuda: &Cuda<D>, op: BiasBackward) -> Result {
    let (rows, width) = (op.dy.dims()[0], op.dy.dims()[1]);
    let parting = Parting {
        rows_min: PART_ROWS_MIN,
        rows_multiple: 1,
        parts_max: BLOCKS_MIN
            .div_ceil(Extent::column_blocks(width).max(1))
            .min(PARTS_MAX),
    };
    let parts = Parts::new(cuda, "bias_backward", [rows, width], 1, parting)?;
    let arguments = arguments! {
        parts.place(cuda, 0), &op.dy, op.dy.strides()[0], rows, parts.part_rows(), width,
    };
    let kernel = kernel!("elementwise", "bias_backward", op.dy.dtype());
    let extent = Extent::columns(parts.part_rows().min(rows), width, parts.count());
    cuda.launch(kernel, extent, &arguments)?;
    parts.add(cuda, 0, (op.out, op.init))
}
