//! Experts: a product an expert, the weighed activation, and the sum of each token's rows.

use super::extent::{Extent, WARP};
use super::{Argument, Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::operation::{
    GroupedGradient, GroupedMatmul, SumRows, WeighedSwiglu, WeighedSwigluBackward,
};
use crate::{Init, KernelError};
use memory::{DType, In};

/// Threads of a block that works on a piece of a row, a pack each.
const THREADS: usize = 128;

/// Rows and columns of a product that a block computes, its threads, how far products of bf16 go from one barrier to the
/// next, and how many such stages are in shared memory: as in `grouped_matmul.cu`.
const TILE: [usize; 2] = [128, 128];
const TILE_THREADS: usize = 4 * WARP;
const DEPTH: usize = 32;
const STAGES: usize = 4;

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

/// Bytes of all stages of both operands. A line of either has a chunk of padding, and by rows there are more lines. Tiles of
/// f32 are the kernel's own.
fn shared_bytes(dtype: DType) -> usize {
    const CHUNK: usize = 16;
    match dtype {
        DType::F32 => 0,
        _ => STAGES * (TILE[0] + TILE[1]) * (DEPTH * dtype.size_in_bytes() + CHUNK),
    }
}

pub(super) fn grouped_matmul<D: Driver>(
    cuda: &Cuda<D>,
    operation: GroupedMatmul,
) -> Result<(), KernelError> {
    let GroupedMatmul {
        out,
        scratch: _,
        rows,
        weights,
        by_columns,
        offsets,
    } = operation;
    let dtype = rows.x.dtype();
    let kernel = match by_columns {
        false => kernel!("grouped_matmul", "grouped_matmul", dtype),
        true => kernel!("grouped_matmul", "grouped_matmul_by_columns", dtype),
    };
    let ([count, inner], experts) = (rows.dims(), weights.dims()[0]);
    let columns = out.dims()[1];
    // As many tiles as the experts' rows can have: every expert may have one that is not full.
    let tiles = (count + experts * (TILE[0] - 1)) / TILE[0];
    let extent = Extent {
        grid: [tiles, columns.div_ceil(TILE[1]), 1],
        block: [TILE_THREADS, 1, 1],
        shared_bytes: shared_bytes(dtype),
    };
    let arguments = [
        (&out).into(),
        (&rows.x).into(),
        table(&rows.row_token),
        (&weights).into(),
        (&offsets).into(),
        Argument::Int(experts as i32),
        inner.into(),
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
        scratch: _,
        dy,
        rows,
        offsets,
        init,
    } = operation;
    let dtype = dy.x.dtype();
    let kernel = kernel!("grouped_matmul", "grouped_gradient", out.dtype(), dtype);
    let [experts, outputs, inner] = [0, 1, 2].map(|dim| out.dims()[dim]);
    let extent = Extent {
        grid: [inner.div_ceil(TILE[1]), outputs.div_ceil(TILE[0]), experts],
        block: [TILE_THREADS, 1, 1],
        shared_bytes: shared_bytes(dtype),
    };
    let arguments = [
        (&out).into(),
        (&dy.x).into(),
        table(&dy.row_token),
        (&rows.x).into(),
        table(&rows.row_token),
        (&offsets).into(),
        outputs.into(),
        inner.into(),
        accumulates(&init),
    ];
    cuda.launch(kernel, extent, &arguments)
}

/// A table of rows, if one is given.
fn table(of_rows: &Option<In>) -> Argument {
    of_rows.as_ref().map_or(Argument::NULL, Argument::from)
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
        table(&row_slot),
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
        table(&row_slot),
        width.into(),
    ];
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}
