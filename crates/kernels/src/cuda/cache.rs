//! Attention over cached keys and values.

use super::extent::Extent;
use super::{Argument, Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{CachedAttention, StoreInCache};
use memory::DType;

/// Threads of a block of attention. A lane has one pack of a head up to this width, or three: as in `cache.cu`.
const THREADS: usize = 256;
const WIDEST: usize = 3 * THREADS;

pub(super) fn store_in_cache<D: Driver>(
    cuda: &Cuda<D>,
    operation: StoreInCache,
) -> Result<(), KernelError> {
    let StoreInCache {
        k_cache,
        v_cache,
        k,
        v,
        table,
        lengths,
    } = operation;
    let kernel = kernel!("cache", "store_in_cache", k.dtype());
    let (rows, k_width, v_width) = (k.dims()[0], k.dims()[1], v.dims()[1]);
    let &[sequences, blocks] = table.dims() else {
        unreachable!("the check asks for two dimensions");
    };
    let arguments = [
        (&k_cache).into(),
        Argument::optional(&v_cache),
        (&k).into(),
        (&v).into(),
        (&table).into(),
        (&lengths).into(),
        blocks.into(),
        (rows / sequences).into(),
        k_width.into(),
        v_width.into(),
    ];
    cuda.launch(kernel, Extent::rows(rows, k_width.max(v_width)), &arguments)
}

pub(super) fn cached_attention<D: Driver>(
    cuda: &Cuda<D>,
    operation: CachedAttention,
) -> Result<(), KernelError> {
    let CachedAttention {
        out,
        q,
        k_cache,
        v_cache,
        table,
        lengths,
        shape,
    } = operation;
    let head_dim = shape.qk_head_dim.max(shape.v_head_dim);
    let kernel = match head_dim {
        ..=THREADS => kernel!("cache", "cached_attention", q.dtype()),
        width if width <= WIDEST => kernel!("cache", "cached_attention_wide", q.dtype()),
        _ => {
            let message =
                format!("heads of {head_dim} are wider than {WIDEST}, the widest on CUDA");
            return Err(KernelError::too_large("cached_attention", message));
        }
    };
    let arguments = [
        (&out).into(),
        (&q).into(),
        (&k_cache).into(),
        v_cache.as_ref().map_or(Argument::NULL, Argument::from),
        (&table).into(),
        (&lengths).into(),
        table.dims()[1].into(),
        shape.seq.into(),
        shape.kv_heads.into(),
        shape.qk_head_dim.into(),
        shape.v_head_dim.into(),
        shape.window.unwrap_or(usize::MAX).into(),
        shape.scale().into(),
    ];
    let extent = Extent {
        grid: [q.dims()[0], shape.heads, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
    };
    cuda.launch(kernel, extent, &arguments)
}
