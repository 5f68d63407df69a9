//! Layers of the gated delta rule while tokens are generated.

use super::extent::{Extent, WARP};
use super::short_convolution::THREADS;
use super::{Cuda, Driver, arguments, int, kernel};
use crate::Result;
use crate::operation::{CachedConvolution, CachedDelta};

/// Tokens of a convolution's block, value columns of a block of the rule, and its warps: as in `delta_cache.cu`.
const TOKENS: usize = 16;
const VALUE_TILE: usize = 32;
const WARPS: usize = 4;

pub(super) fn cached_convolution<D: Driver>(cuda: &Cuda<D>, op: CachedConvolution) -> Result {
    let &[tokens, columns] = op.out.dims() else {
        unreachable!("the check asks for two dimensions")
    };
    let (sequences, taps) = (op.lengths.elements(), op.weight.dims()[1]);
    let seq = tokens / sequences;
    let arguments = arguments! {
        &op.out, &op.before, &op.x, op.x.strides()[0], &op.weight, &op.lengths, seq, columns, int(taps),
    };
    let grid = [
        sequences * seq.div_ceil(TOKENS),
        columns.div_ceil(THREADS),
        1,
    ];
    let kernel = kernel!("delta_cache", "cached_convolution", op.x.dtype());
    cuda.launch(kernel, Extent::new(grid, [THREADS, 1, 1]), &arguments)
}

pub(super) fn cached_delta<D: Driver>(cuda: &Cuda<D>, op: CachedDelta) -> Result {
    let shape = op.shape;
    let arguments = arguments! {
        &op.out, &op.states, &op.mixed, &op.b, op.b.strides()[0], &op.a, op.a.strides()[0], &op.a_log, &op.dt_bias, &op.lengths,
        shape.seq, int(shape.key_heads), int(shape.value_heads), int(shape.key_dim), int(shape.value_dim),
    };
    let grid = [
        shape.batch * shape.value_heads,
        shape.value_dim.div_ceil(VALUE_TILE),
        1,
    ];
    let kernel = kernel!("delta_cache", "cached_delta", op.mixed.dtype());
    cuda.launch(kernel, Extent::new(grid, [WARPS * WARP, 1, 1]), &arguments)
}
