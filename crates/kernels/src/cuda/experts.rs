//! Experts: a product an expert, the weighed activation, and the sum of each token's rows.

use super::extent::{Extent, WARP};
use super::{Argument, Cuda, Driver, accumulates, arguments, int, kernel};
use crate::operation::{
    GroupedGradient, GroupedMatmul, SumRows, WeighedSwiglu, WeighedSwigluBackward,
};
use crate::{Init, Result};
use memory::DType;

/// Threads of a block that works on a piece of a row, a pack each.
const THREADS: usize = 128;

/// Rows and columns of a product that a block computes, its threads, how far products of bf16 go from one barrier to the
/// next, and how many such stages are in shared memory: as in `grouped_matmul.cu`.
const TILE: [usize; 2] = [128, 128];
const TILE_THREADS: usize = 4 * WARP;
const DEPTH: usize = 32;
const STAGES: usize = 4;

pub(super) fn sum_rows<D: Driver>(cuda: &Cuda<D>, op: SumRows) -> Result {
    let kernel = kernel!("experts", "sum_rows", op.out.dtype());
    let (tokens, width) = (op.out.dims()[0], op.out.dims()[1]);
    let init = match op.init {
        Init::Overwrite => Argument::NULL,
        Init::Accumulate => (&op.out).into(),
        Init::Add(residual) => (&residual).into(),
    };
    let choices = op.slot_row.dims()[1];
    let arguments = arguments![&op.out, &op.rows, &op.slot_row, init, choices, width];
    let extent = Extent::rows_by_columns(tokens, width, THREADS);
    cuda.launch(kernel, extent, &arguments)
}

/// Bytes of all stages of both operands. A line of either has a chunk of padding, and by rows there are more lines. Tiles of
/// f32 are the kernel's own.
fn shared_bytes(dtype: DType) -> usize {
    const CHUNK: usize = 16;
    match dtype {
        DType::F32 => 0,
        _ => STAGES * (TILE[0] + TILE[1]) * (DEPTH * dtype.size_in_bytes() + CHUNK),
    }
}

pub(super) fn grouped_matmul<D: Driver>(cuda: &Cuda<D>, op: GroupedMatmul) -> Result {
    let dtype = op.rows.x.dtype();
    let kernel = match op.by_columns {
        false => kernel!("grouped_matmul", "grouped_matmul", dtype),
        true => kernel!("grouped_matmul", "grouped_matmul_by_columns", dtype),
    };
    let ([count, inner], experts) = (op.rows.dims(), op.weights.dims()[0]);
    let columns = op.out.dims()[1];
    // As many tiles as the experts' rows can have: every expert may have one that is not full.
    let tiles = (count + experts * (TILE[0] - 1)) / TILE[0];
    let extent = Extent {
        grid: [tiles, columns.div_ceil(TILE[1]), 1],
        block: [TILE_THREADS, 1, 1],
        shared_bytes: shared_bytes(dtype),
    };
    let arguments = arguments! {
        &op.out, &op.rows.x, &op.rows.row_token, &op.weights, &op.offsets, int(experts), inner,
        columns,
    };
    cuda.launch(kernel, extent, &arguments)
}

pub(super) fn grouped_gradient<D: Driver>(cuda: &Cuda<D>, op: GroupedGradient) -> Result {
    let dtype = op.dy.x.dtype();
    let kernel = kernel!("grouped_matmul", "grouped_gradient", op.out.dtype(), dtype);
    let [experts, outputs, inner] = [0, 1, 2].map(|dim| op.out.dims()[dim]);
    let extent = Extent {
        grid: [inner.div_ceil(TILE[1]), outputs.div_ceil(TILE[0]), experts],
        block: [TILE_THREADS, 1, 1],
        shared_bytes: shared_bytes(dtype),
    };
    let arguments = arguments! {
        &op.out, &op.dy.x, &op.dy.row_token, &op.rows.x, &op.rows.row_token, &op.offsets, outputs,
        inner, accumulates(&op.init),
    };
    cuda.launch(kernel, extent, &arguments)
}

pub(super) fn weighed_swiglu<D: Driver>(cuda: &Cuda<D>, op: WeighedSwiglu) -> Result {
    let kernel = kernel!("experts", "weighed_swiglu", op.act.dtype());
    let (rows, width) = (op.act.dims()[0], op.act.dims()[1]);
    let arguments = arguments![&op.act, &op.gate_up, &op.weights, &op.row_slot, width];
    let extent = Extent::rows_by_columns(rows, width, THREADS);
    cuda.launch(kernel, extent, &arguments)
}

pub(super) fn weighed_swiglu_backward<D: Driver>(
    cuda: &Cuda<D>,
    op: WeighedSwigluBackward,
) -> Result {
    let kernel = kernel!("experts", "weighed_swiglu_backward", op.dact.dtype());
    let (rows, width) = (op.dact.dims()[0], op.dact.dims()[1]);
    let arguments = arguments! {
        &op.gate_up, &op.dweights, &op.dact, &op.weights, &op.row_slot, width,
    };
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}
