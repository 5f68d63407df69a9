//! Experts: a product an expert, the weighed activation, and the sum of each token's rows.

use super::extent::{Extent, WARP};
use super::{Argument, Cuda, Driver, KernelKind, accumulates, arguments, int, kernel};
use crate::operation::{
    GroupedGradient, GroupedMatmul, SumRows, WeighedSwiglu, WeighedSwigluBackward,
};
use crate::{Init, Result};
use memory::DType;

/// Threads of a block that works on a piece of a row, a pack each.
const THREADS: usize = 128;

/// How kernels of a kind compute a product.
struct Tile {
    /// Rows and columns of the output that are computed at a time.
    rows: usize,
    columns: usize,
    /// Threads of a block.
    threads: usize,
    /// Dynamic shared memory of a block.
    shared_bytes: usize,
}

const CHUNK_BYTES: usize = 16;

/// As in `grouped_matmul.cu`: four stages of [`DEPTH`] places in bf16. A line of either factor has a chunk of padding, and by
/// rows there are more lines.
const SM80: Tile = Tile {
    rows: 128,
    columns: 128,
    threads: 4 * WARP,
    shared_bytes: 4 * (128 + 128) * (DEPTH * 2 + CHUNK_BYTES),
};
const DEPTH: usize = 32;

/// Tiles of f32 are static.
const SM80_F32: Tile = Tile {
    shared_bytes: 0,
    ..SM80
};

/// As in `grouped_matmul_sm90.cu`: four stages of 64 places, and two barriers each.
const SM90: Tile = Tile {
    rows: 128,
    columns: 256,
    threads: 12 * WARP,
    shared_bytes: 4 * ((128 + 256) * 64 * 2 + 2 * 8),
};

/// Tiles side by side that a block computes at most, one after the other, and how many blocks are enough for any GPU: with more tiles
/// blocks compute several.
const TILES_MAX: usize = 4;
const BLOCKS_ENOUGH: usize = 1024;

impl Tile {
    fn of(kind: KernelKind, dtype: DType) -> Tile {
        match (kind, dtype) {
            (_, DType::F32) => SM80_F32,
            (KernelKind::Sm80, _) => SM80,
            (KernelKind::Sm90, _) => SM90,
        }
    }

    /// Blocks of this tile's threads.
    fn extent(&self, grid: [usize; 3]) -> Extent {
        Extent {
            grid,
            block: [self.threads, 1, 1],
            shared_bytes: self.shared_bytes,
        }
    }
}

/// Tiles that a block computes, where `columns` of them lie side by side and there are so many `rows` of these.
fn tiles_of_block(rows: usize, columns: usize) -> usize {
    (rows * columns / BLOCKS_ENOUGH)
        .clamp(1, TILES_MAX)
        .min(columns.max(1))
}

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

pub(super) fn grouped_matmul<D: Driver>(cuda: &Cuda<D>, op: GroupedMatmul) -> Result {
    let dtype = op.rows.x.dtype();
    let tile = Tile::of(cuda.experts, dtype);
    let ([count, inner], experts) = (op.rows.dims(), op.weights.dims()[0]);
    let columns = op.out.dims()[1];
    // As many tiles as the experts' rows can have: every expert may have one that is not full.
    let below = (count + experts * (tile.rows - 1)) / tile.rows;
    let beside = columns.div_ceil(tile.columns);
    let arguments = arguments! {
        &op.out, &op.rows.x, &op.rows.row_token, &op.weights, &op.offsets, int(experts), inner,
        columns,
    };
    if let (KernelKind::Sm90, DType::BF16) = (cuda.experts, dtype) {
        let kernel = match op.by_columns {
            false => kernel!("grouped_matmul_sm90", "grouped_matmul_sm90", dtype),
            true => kernel!(
                "grouped_matmul_sm90",
                "grouped_matmul_by_columns_sm90",
                dtype
            ),
        };
        let tiles = tiles_of_block(below, beside);
        let extent = tile.extent([below * beside.div_ceil(tiles), 1, 1]);
        return cuda.launch(kernel, extent, &[&arguments[..], &[int(tiles)]].concat());
    }
    let kernel = match op.by_columns {
        false => kernel!("grouped_matmul", "grouped_matmul", dtype),
        true => kernel!("grouped_matmul", "grouped_matmul_by_columns", dtype),
    };
    cuda.launch(kernel, tile.extent([below, beside, 1]), &arguments)
}

pub(super) fn grouped_gradient<D: Driver>(cuda: &Cuda<D>, op: GroupedGradient) -> Result {
    let dtype = op.dy.x.dtype();
    let tile = Tile::of(cuda.experts, dtype);
    let [experts, outputs, inner] = [0, 1, 2].map(|dim| op.out.dims()[dim]);
    let (below, beside) = (outputs.div_ceil(tile.rows), inner.div_ceil(tile.columns));
    let arguments = arguments! {
        &op.out, &op.dy.x, &op.dy.row_token, &op.rows.x, &op.rows.row_token, &op.offsets, outputs,
        inner, accumulates(&op.init),
    };
    if let (KernelKind::Sm90, DType::BF16) = (cuda.experts, dtype) {
        let kernel = kernel!(
            "grouped_matmul_sm90",
            "grouped_gradient_sm90",
            op.out.dtype(),
            dtype
        );
        let tiles = tiles_of_block(below * experts, beside);
        let extent = tile.extent([beside.div_ceil(tiles), below, experts]);
        return cuda.launch(kernel, extent, &[&arguments[..], &[int(tiles)]].concat());
    }
    let kernel = kernel!("grouped_matmul", "grouped_gradient", op.out.dtype(), dtype);
    cuda.launch(kernel, tile.extent([beside, below, experts]), &arguments)
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
