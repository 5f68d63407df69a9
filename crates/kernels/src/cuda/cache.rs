//! Attention over cached keys and values.

use super::attention::score_arguments;
use super::extent::Extent;
use super::{Cuda, Driver, arguments, kernel};
use crate::operation::{CachedAttention, StoreInCache};
use crate::{KernelError, Result};

/// Threads of a block of attention. A lane has one pack of a head up to this width, or three: as in `cache.cu`.
const THREADS: usize = 256;
const WIDEST: usize = 3 * THREADS;

pub(super) fn store_in_cache<D: Driver>(cuda: &Cuda<D>, op: StoreInCache) -> Result {
    let kernel = kernel!("cache", "store_in_cache", op.k.dtype());
    let (rows, k_width, v_width) = (op.k.dims()[0], op.k.dims()[1], op.v.dims()[1]);
    let &[sequences, blocks] = op.table.dims() else {
        unreachable!("the check asks for two dimensions");
    };
    let arguments = arguments! {
        &op.k_cache, &op.v_cache, &op.k, &op.v, &op.table, &op.lengths, blocks, rows / sequences,
        k_width, v_width,
    };
    cuda.launch(kernel, Extent::rows(rows, k_width.max(v_width)), &arguments)
}

pub(super) fn cached_attention<D: Driver>(cuda: &Cuda<D>, op: CachedAttention) -> Result {
    let head_dim = op.shape.qk_head_dim.max(op.shape.v_head_dim);
    let kernel = match head_dim {
        ..=THREADS => kernel!("cache", "cached_attention", op.q.dtype()),
        width if width <= WIDEST => kernel!("cache", "cached_attention_wide", op.q.dtype()),
        _ => {
            let message =
                format!("heads of {head_dim} are wider than {WIDEST}, the widest on CUDA");
            return Err(KernelError::too_large("cached_attention", message));
        }
    };
    let [scale, cap, within_cap] = score_arguments(op.shape);
    let arguments = arguments! {
        &op.out, &op.q, &op.k_cache, &op.v_cache, &op.table, &op.lengths, op.table.dims()[1],
        op.shape.seq, op.shape.kv_heads, op.shape.qk_head_dim, op.shape.v_head_dim,
        &op.sinks, op.shape.window.unwrap_or(usize::MAX), scale, cap, within_cap,
    };
    let extent = Extent::new([op.q.dims()[0], op.shape.heads, 1], [THREADS, 1, 1]);
    cuda.launch(kernel, extent, &arguments)
}
