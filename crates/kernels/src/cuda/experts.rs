//! Experts: a product an expert, the weighed activation, and the sum of each token's rows.

use super::extent::{Extent, WARP};
use super::swiglu::by_function;
use super::{Argument, Cuda, Driver, KernelKind, accumulates, arguments, int, kernel};
use crate::operation::{
    ExpertBiasDweights, ExpertBiasGradient, GateFunction, GroupedGradient, GroupedMatmul, SumRows,
    WeighedGatedActivation, WeighedGatedActivationBackward,
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

/// As in `grouped_matmul.cu`: four stages of 32 places in bf16. A line of either factor has a chunk of 16 bytes of padding, and by
/// rows there are more lines.
const SM80: Tile = Tile {
    rows: 128,
    columns: 128,
    threads: 4 * WARP,
    shared_bytes: 4 * (128 + 128) * (32 * 2 + 16),
};

/// The same for f32, whose tiles are static.
const SM80_F32: Tile = Tile {
    shared_bytes: 0,
    ..SM80
};

/// As in `grouped_matmul_sm90.cu`: four stages of 64 places, and two barriers of 8 bytes each.
const SM90: Tile = Tile {
    rows: 128,
    columns: 256,
    threads: 12 * WARP,
    shared_bytes: 4 * ((128 + 256) * 64 * 2 + 2 * 8),
};

/// The most tiles that a block of kernels for Hopper computes, side by side and one after the other.
const TILES_MAX: usize = 4;

/// So many blocks keep any GPU busy to the end of a launch. Where there are more tiles, blocks compute several.
pub const BLOCKS_ENOUGH: usize = 1024;

impl Tile {
    fn of(kind: KernelKind, dtype: DType) -> Tile {
        match (kind, dtype) {
            (KernelKind::Sm90, _) => SM90,
            (KernelKind::Sm80, DType::F32) => SM80_F32,
            (KernelKind::Sm80, _) => SM80,
        }
    }

    fn extent(&self, grid: [usize; 3]) -> Extent {
        Extent {
            grid,
            block: [self.threads, 1, 1],
            shared_bytes: self.shared_bytes,
        }
    }
}

/// The kind of kernels for products of this type: f32 has one.
fn kind_for<D>(cuda: &Cuda<D>, dtype: DType) -> KernelKind {
    match dtype {
        DType::BF16 => cuda.experts,
        _ => KernelKind::Sm80,
    }
}

/// How many tiles that lie side by side a block for Hopper computes, of `row_tiles` x `column_tiles`.
fn tiles_of_block<D>(cuda: &Cuda<D>, row_tiles: usize, column_tiles: usize) -> usize {
    let most = (row_tiles * column_tiles / cuda.blocks_enough).clamp(1, TILES_MAX);
    // All blocks have as many, or the last has a few less.
    column_tiles.div_ceil(column_tiles.div_ceil(most).max(1))
}

pub(super) fn sum_rows<D: Driver>(cuda: &Cuda<D>, op: SumRows) -> Result {
    let (dtype, tokens, width) = (op.out.dtype(), op.out.dims()[0], op.out.dims()[1]);
    let init = match op.init {
        Init::Overwrite => Argument::NULL,
        Init::Accumulate => (&op.out).into(),
        Init::Add(residual) => (&residual).into(),
    };
    let choices = op.slot_row.dims()[1];
    let arguments = arguments![&op.out, &op.rows, &op.slot_row, init, choices, width];
    let extent = Extent::rows_by_columns(tokens, width, THREADS);
    let Some(bias) = op.bias else {
        let kernel = kernel!("experts", "sum_rows", dtype);
        return cuda.launch(kernel, extent, &arguments);
    };
    let more = arguments![&bias.of.bias, &bias.of.ids, &bias.weights];
    let kernel = kernel!("experts", "sum_rows_biased", dtype);
    cuda.launch(kernel, extent, &[&arguments[..], &more].concat())
}

pub(super) fn grouped_matmul<D: Driver>(cuda: &Cuda<D>, op: GroupedMatmul) -> Result {
    let dtype = op.rows.x.dtype();
    let kind = kind_for(cuda, dtype);
    let tile = Tile::of(kind, dtype);
    let ([count, inner], experts) = (op.rows.dims(), op.weights.dims()[0]);
    let columns = op.out.dims()[1];
    // As many tiles as the experts' rows can have: every expert may have one that is not full.
    let row_tiles = (count + experts * (tile.rows - 1)) / tile.rows;
    let column_tiles = columns.div_ceil(tile.columns);
    let mut arguments = arguments! {
        &op.out, &op.rows.x, &op.rows.row_token, &op.weights, &op.offsets, int(experts), inner,
        columns,
    }
    .to_vec();
    let (kernel, grid) = match kind {
        KernelKind::Sm80 => {
            let kernel = match op.by_columns {
                false => kernel!("grouped_matmul", "grouped_matmul", dtype),
                true => kernel!("grouped_matmul", "grouped_matmul_by_columns", dtype),
            };
            (kernel, [row_tiles, column_tiles, 1])
        }
        KernelKind::Sm90 => {
            let kernel = match op.by_columns {
                false => kernel!("grouped_matmul_sm90", "grouped_matmul_sm90_bf16"),
                true => kernel!("grouped_matmul_sm90", "grouped_matmul_by_columns_sm90_bf16"),
            };
            // Only these experts' rows have work.
            let working = (row_tiles * experts).div_ceil(op.of_experts);
            let tiles = tiles_of_block(cuda, working, column_tiles);
            arguments.push(int(tiles));
            (kernel, [row_tiles * column_tiles.div_ceil(tiles), 1, 1])
        }
    };
    cuda.launch(kernel, tile.extent(grid), &arguments)
}

pub(super) fn grouped_gradient<D: Driver>(cuda: &Cuda<D>, op: GroupedGradient) -> Result {
    let dtype = op.dy.x.dtype();
    let kind = kind_for(cuda, dtype);
    let tile = Tile::of(kind, dtype);
    let [experts, outputs, inner] = [0, 1, 2].map(|dim| op.out.dims()[dim]);
    let row_tiles = outputs.div_ceil(tile.rows);
    let column_tiles = inner.div_ceil(tile.columns);
    let mut arguments = arguments! {
        &op.out, &op.dy.x, &op.dy.row_token, &op.rows.x, &op.rows.row_token, &op.offsets, outputs,
        inner, accumulates(&op.init),
    }
    .to_vec();
    let (kernel, blocks) = match kind {
        KernelKind::Sm80 => {
            let kernel = kernel!("grouped_matmul", "grouped_gradient", op.out.dtype(), dtype);
            (kernel, column_tiles)
        }
        KernelKind::Sm90 => {
            let kernel = kernel!(
                "grouped_matmul_sm90",
                "grouped_gradient_sm90",
                op.out.dtype(),
                dtype
            );
            let tiles = tiles_of_block(cuda, row_tiles * experts, column_tiles);
            arguments.push(int(tiles));
            (kernel, column_tiles.div_ceil(tiles))
        }
    };
    cuda.launch(
        kernel,
        tile.extent([blocks, row_tiles, experts]),
        &arguments,
    )
}

pub(super) fn weighed_gated_activation<D: Driver>(
    cuda: &Cuda<D>,
    op: WeighedGatedActivation,
) -> Result {
    let dtype = op.act.dtype();
    let (rows, width) = (op.act.dims()[0], op.act.dims()[1]);
    let [alpha, limit] = op.function.alpha_and_limit();
    let arguments = arguments! {
        &op.act, &op.gate_up, &op.weights, &op.row_slot, width, alpha, limit,
    };
    let extent = Extent::rows_by_columns(rows, width, THREADS);
    let Some(bias) = op.bias else {
        let kernel = by_function!(kernel!(op.function, "experts", "weighed_", ""), dtype);
        return cuda.launch(kernel, extent, &arguments);
    };
    let more = arguments![&bias.bias, &bias.ids];
    let kernel = by_function!(
        kernel!(op.function, "experts", "weighed_", "_biased"),
        dtype
    );
    cuda.launch(kernel, extent, &[&arguments[..], &more].concat())
}

pub(super) fn weighed_gated_activation_backward<D: Driver>(
    cuda: &Cuda<D>,
    op: WeighedGatedActivationBackward,
) -> Result {
    let dtype = op.dact.dtype();
    let [alpha, limit] = op.function.alpha_and_limit();
    let (rows, width) = (op.dact.dims()[0], op.dact.dims()[1]);
    let arguments = arguments! {
        &op.gate_up, &op.dweights, &op.dact, &op.weights, &op.row_slot, width, alpha, limit,
    };
    let extent = Extent::rows(rows, width);
    if let (None, Init::Overwrite) = (&op.bias, &op.dweights_init) {
        let kernel = by_function!(
            kernel!(op.function, "experts", "weighed_", "_backward"),
            dtype
        );
        return cuda.launch(kernel, extent, &arguments);
    }
    let (bias, ids) = op.bias.map(|of| (of.bias, of.ids)).unzip();
    let more = arguments![&bias, &ids, accumulates(&op.dweights_init)];
    let kernel = by_function!(
        kernel!(op.function, "experts", "weighed_", "_backward_biased"),
        dtype
    );
    cuda.launch(kernel, extent, &[&arguments[..], &more].concat())
}

pub(super) fn expert_bias_gradient<D: Driver>(cuda: &Cuda<D>, op: ExpertBiasGradient) -> Result {
    let kernel = kernel!(
        "experts",
        "expert_bias_gradient",
        op.out.dtype(),
        op.dy.x.dtype()
    );
    let ([rows, width], experts) = (op.dy.dims(), op.out.dims()[0]);
    let weights = op.weights.as_ref().map(|of| of.weights);
    let row_slot = op.weights.as_ref().and_then(|of| of.row_slot);
    let arguments = arguments! {
        &op.out, &op.dy.x, &op.dy.row_token, &weights, &row_slot, &op.offsets, width,
        accumulates(&op.init),
    };
    // As many lanes as experts of one size need.
    let extent = Extent::columns(rows.div_ceil(experts.max(1)), width, experts);
    cuda.launch(kernel, extent, &arguments)
}

pub(super) fn expert_bias_dweights<D: Driver>(cuda: &Cuda<D>, op: ExpertBiasDweights) -> Result {
    let kernel = kernel!("experts", "expert_bias_dweights", op.dy.dtype());
    let (choices, width) = (op.dweights.dims()[1], op.dy.dims()[1]);
    let arguments = arguments! {
        &op.dweights, &op.dy, &op.bias.bias, &op.bias.ids, choices, width,
    };
    let extent = Extent::rows(op.dweights.elements(), width);
    cuda.launch(kernel, extent, &arguments)
}
