//! Experts: rows gathered by expert, a product an expert, the weighed activation, and the sum of each token's rows.

use super::extent::{Extent, WARP};
use super::{Argument, Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::operation::{
    GatherRows, GroupedGradient, GroupedMatmul, SumRows, WeighedSwiglu, WeighedSwigluBackward,
};
use crate::{Init, KernelError};
use memory::{DType, In};

/// Threads of a block that works on a piece of a row, a pack each.
const THREADS: usize = 128;

/// Rows and columns of a product that a block computes, its threads, and how far products of bf16 go from one barrier to
/// the next: as in `grouped_matmul.cu`.
const TILE: [usize; 2] = [64, 128];
const TILE_THREADS: usize = 4 * WARP;
const DEPTH: usize = 64;

pub(super) fn gather_rows<D: Driver>(
    cuda: &Cuda<D>,
    GatherRows { rows, x, row_token }: GatherRows,
) -> Result<(), KernelError> {
    let kernel = kernel!("experts", "gather_rows", x.dtype());
    let (count, width) = (rows.dims()[0], rows.dims()[1]);
    let arguments = [
        (&rows).into(),
        (&x).into(),
        (&row_token).into(),
        width.into(),
    ];
    cuda.launch(kernel, Extent::rows(count, width), &arguments)
}

pub(super) fn sum_rows<D: Driver>(cuda: &Cuda<D>, operation: SumRows) -> Result<(), KernelError> {
    let SumRows {
        out,
        rows,
        slot_row,
        init,
    } = operation;
    let kernel = kernel!("experts", "sum_rows", out.dtype());
    let (tokens, width) = (out.dims()[0], out.dims()[1]);
    let arguments = [
        (&out).into(),
        (&rows).into(),
        (&slot_row).into(),
        match init {
            Init::Overwrite => Argument::NULL,
            Init::Accumulate => (&out).into(),
            Init::Add(residual) => (&residual).into(),
        },
        slot_row.dims()[1].into(),
        width.into(),
    ];
    let extent = Extent::rows_by_columns(tokens, width, THREADS);
    cuda.launch(kernel, extent, &arguments)
}

/// Bytes of two stages of both operands: one is multiplied while the other is copied. A line of either has a chunk of padding,
/// and by rows there are more lines. Tiles of f32 are the kernel's own.
fn shared_bytes(dtype: DType) -> usize {
    const CHUNK: usize = 16;
    match dtype {
        DType::F32 => 0,
        _ => 2 * (TILE[0] + TILE[1]) * (DEPTH * dtype.size_in_bytes() + CHUNK),
    }
}

pub(super) fn grouped_matmul<D: Driver>(
    cuda: &Cuda<D>,
    operation: GroupedMatmul,
) -> Result<(), KernelError> {
    let GroupedMatmul {
        out,
        x,
        weights,
        by_columns,
        offsets,
    } = operation;
    let kernel = match by_columns {
        false => kernel!("grouped_matmul", "grouped_matmul", x.dtype()),
        true => kernel!("grouped_matmul", "grouped_matmul_by_columns", x.dtype()),
    };
    let ([rows, columns], experts) = ([out.dims()[0], out.dims()[1]], weights.dims()[0]);
    // As many tiles as the experts' rows can have: every expert may have one that is not full.
    let tiles = (rows + experts * (TILE[0] - 1)) / TILE[0];
    let extent = Extent {
        grid: [tiles, columns.div_ceil(TILE[1]), 1],
        block: [TILE_THREADS, 1, 1],
        shared_bytes: shared_bytes(x.dtype()),
    };
    let arguments = [
        (&out).into(),
        (&x).into(),
        (&weights).into(),
        (&offsets).into(),
        Argument::Int(experts as i32),
        x.dims()[1].into(),
        columns.into(),
    ];
    cuda.launch(kernel, extent, &arguments)
}

pub(super) fn grouped_gradient<D: Driver>(
    cuda: &Cuda<D>,
    operation: GroupedGradient,
) -> Result<(), KernelError> {
    let GroupedGradient {
        out,
        dy,
        x,
        offsets,
        init,
    } = operation;
    let kernel = kernel!(
        "grouped_matmul",
        "grouped_gradient",
        out.dtype(),
        dy.dtype()
    );
    let [experts, outputs, inner] = [0, 1, 2].map(|dim| out.dims()[dim]);
    let extent = Extent {
        grid: [inner.div_ceil(TILE[1]), outputs.div_ceil(TILE[0]), experts],
        block: [TILE_THREADS, 1, 1],
        shared_bytes: shared_bytes(dy.dtype()),
    };
    let arguments = [
        (&out).into(),
        (&dy).into(),
        (&x).into(),
        (&offsets).into(),
        outputs.into(),
        inner.into(),
        accumulates(&init),
    ];
    cuda.launch(kernel, extent, &arguments)
}

/// The choice of each row, if they are given.
fn slots(row_slot: &Option<In>) -> Argument {
    row_slot.as_ref().map_or(Argument::NULL, Argument::from)
}

pub(super) fn weighed_swiglu<D: Driver>(
    cuda: &Cuda<D>,
    operation: WeighedSwiglu,
) -> Result<(), KernelError> {
    let WeighedSwiglu {
        act,
        gate_up,
        weights,
        row_slot,
    } = operation;
    let kernel = kernel!("experts", "weighed_swiglu", act.dtype());
    let (rows, width) = (act.dims()[0], act.dims()[1]);
    let arguments = [
        (&act).into(),
        (&gate_up).into(),
        (&weights).into(),
        slots(&row_slot),
        width.into(),
    ];
    let extent = Extent::rows_by_columns(rows, width, THREADS);
    cuda.launch(kernel, extent, &arguments)
}

pub(super) fn weighed_swiglu_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: WeighedSwigluBackward,
) -> Result<(), KernelError> {
    let WeighedSwigluBackward {
        gate_up,
        dweights,
        dact,
        weights,
        row_slot,
    } = operation;
    let kernel = kernel!("experts", "weighed_swiglu_backward", dact.dtype());
    let (rows, width) = (dact.dims()[0], dact.dims()[1]);
    let arguments = [
        (&gate_up).into(),
        (&dweights).into(),
        (&dact).into(),
        (&weights).into(),
        slots(&row_slot),
        width.into(),
    ];
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}
