//! Attention that never stores the scores.
//!
//! A block of threads keeps rows of one head, and goes over tiles of other rows. Heads are padded to one of a few
//! widths that kernels exist for.

mod sm80;
mod sm90;

pub use sm80::flash_shared_bytes;
pub use sm90::flash_has_sm90;

use super::attention::score_arguments;
use super::dropout::dropout_arguments;
use super::extent::Extent;
use super::sinks::sink_gradient;
use super::{Argument, Cuda, Driver, Kernel, KernelKind, arguments, kernel};
use crate::operation::{FlashAttention, FlashAttentionBackward};
use crate::{AttentionShape, FlashOptions, Result};
use memory::{DType, In, Out};

/// Threads of a block that computes sums of rows.
const SUM_THREADS: usize = 128;

/// Elements of a row that a thread reads at a time: `PACK` in `pack.cuh`.
const PACK: usize = 8;

const WARP: usize = 32;

/// The window of attention without a window: `NO_WINDOW` in `flash_attention.cuh`.
const NO_WINDOW: i32 = 1 << 30;

/// Blocks of 64 keys of the pass for dk and dv on CUDA that are enough for any device: two on each of an H100's 132
/// multiprocessors at a time, and as many again, since the last keys have far fewer queries than the first. More cost
/// scratch. Blocks for Hopper have twice the keys, and a multiprocessor each.
const BLOCKS: usize = 512;

/// Parts into which the query heads of each key-value head are divided, as equally as possible. Each sums its
/// own `dk` and `dv`. They are as few as give enough blocks. They depend on the shape and not on the device, and so do
/// the bits of the sums.
pub(crate) fn head_parts(shape: AttentionShape, dtype: DType) -> usize {
    let width = sm80::kernel_width(shape).unwrap_or(usize::MAX);
    let keys = shape.seq.div_ceil(sm80::block_keys(width, dtype));
    let blocks = shape.batch * shape.kv_heads * keys;
    BLOCKS.div_ceil(blocks.max(1)).min(shape.group())
}

/// The f32 elements of the sums of all parts; none if one part has all query heads.
pub(crate) fn partial_sums(shape: AttentionShape, dtype: DType) -> usize {
    match head_parts(shape, dtype) {
        1 => 0,
        parts => parts * (elements(shape.k()) + elements(shape.v())),
    }
}

fn elements([rows, width]: [usize; 2]) -> usize {
    rows * width
}

/// How the blocks of a pass work.
struct Pass {
    kernel: Kernel,
    /// Queries, or keys, that a block keeps.
    rows: usize,
    threads: usize,
    /// Dynamic shared memory of a block.
    shared_bytes: usize,
}

/// The kernels of one shape.
struct Passes {
    forward: Pass,
    query_gradients: Pass,
    key_gradients: Pass,
}

impl Pass {
    /// One block per sequence, head and block of rows.
    fn extent(&self, shape: AttentionShape, heads: usize) -> Extent {
        Extent {
            grid: [shape.batch, heads, shape.seq.div_ceil(self.rows)],
            block: [self.threads, 1, 1],
            shared_bytes: self.shared_bytes,
        }
    }
}

/// The kind of kernels for a shape and a type, and these.
///
/// # Errors
/// [`KernelError`](crate::KernelError) if no kernel is as wide as its heads.
fn passes_for<D>(
    cuda: &Cuda<D>,
    operation: &'static str,
    shape: AttentionShape,
    dtype: DType,
) -> Result<(KernelKind, Passes)> {
    let for_hopper = match (cuda.attention, dtype) {
        (KernelKind::Sm90, DType::BF16) => sm90::passes(shape),
        _ => None,
    };
    match for_hopper {
        Some(passes) => Ok((KernelKind::Sm90, passes)),
        None => Ok((KernelKind::Sm80, sm80::passes(operation, shape, dtype)?)),
    }
}

/// The arguments of a kernel, `N` in all, without an allocation.
fn joined<const N: usize, const PARTS: usize>(parts: [&[Argument]; PARTS]) -> [Argument; N] {
    let mut all = parts.into_iter().flatten().copied();
    let joined = std::array::from_fn(|_| all.next().expect("as many as the kernel has"));
    assert!(all.next().is_none(), "as many as the kernel has");
    joined
}

/// The arguments that every kernel ends with.
fn common(shape: AttentionShape, options: &FlashOptions) -> [Argument; 13] {
    let [scale, cap, within_cap] = score_arguments(shape);
    let [threshold, key, kept_scale] = dropout_arguments(options.dropout);
    let window = match shape.is_windowed() {
        true => shape.reach() as i32,
        false => NO_WINDOW,
    };
    arguments! {
        &options.documents, shape.seq, shape.heads, shape.kv_heads, shape.qk_head_dim,
        shape.v_head_dim, scale, Argument::Int(window), threshold, key, kept_scale, cap, within_cap,
    }
}

pub(super) fn flash_attention<D: Driver>(cuda: &Cuda<D>, op: FlashAttention) -> Result {
    let (_, Passes { forward, .. }) = passes_for(cuda, "flash_attention", op.shape, op.q.dtype())?;
    let operands = arguments![&op.out, &op.lse, &op.sinks, &op.q, &op.k, &op.v];
    let arguments: [Argument; 19] = joined([&operands, &common(op.shape, &op.options)]);
    let extent = forward.extent(op.shape, op.shape.heads);
    cuda.launch(forward.kernel, extent, &arguments)
}

pub(super) fn flash_attention_backward<D: Driver>(
    cuda: &Cuda<D>,
    op: FlashAttentionBackward,
) -> Result {
    let (shape, dtype) = (op.shape, op.q.dtype());
    let (kind, passes) = passes_for(cuda, "flash_attention_backward", shape, dtype)?;
    // The partial sums come first, because they are accessed in wide words and need alignment.
    let parts = head_parts(shape, dtype);
    let (partial, sums) = op.scratch.split_at(partial_sums(shape, dtype));
    let read = arguments![&op.dout, &op.lse, &sums, &op.q, &op.k, &op.v];
    let common = common(shape, &op.options);
    let Pass { kernel, .. } = passes.query_gradients;
    let extent = passes.query_gradients.extent(shape, shape.heads);
    match kind {
        KernelKind::Sm80 => {
            row_sums(cuda, &sums, &op.dout, &op.out, shape)?;
            let arguments: [Argument; 20] = joined([&arguments![&op.dq], &read, &common]);
            cuda.launch(kernel, extent, &arguments)?;
        }
        // The kernel for dq finds the sums of rows, too.
        KernelKind::Sm90 => {
            let operands = arguments! {
                &op.dq, &sums, &op.dout, &op.out, &op.lse, &op.q, &op.k, &op.v,
            };
            let arguments: [Argument; 21] = joined([&operands, &common]);
            cuda.launch(kernel, extent, &arguments)?;
        }
    }
    let written = arguments![&op.dk, &op.dv, &partial, parts];
    let Pass { kernel, .. } = passes.key_gradients;
    let extent = passes.key_gradients.extent(shape, shape.kv_heads * parts);
    let arguments: [Argument; 23] = joined([&written, &read, &common]);
    cuda.launch(kernel, extent, &arguments)?;
    if parts > 1 {
        add_parts(cuda, written, [&op.dk, &op.dv])?;
    }
    match (&op.dsinks, &op.sinks) {
        (Some(dsinks), Some(sinks)) => {
            let gradient = (dsinks, &op.dsinks_init);
            sink_gradient(cuda, gradient, [sinks, &op.lse, &sums.as_in()], shape)
        }
        _ => Ok(()),
    }
}

/// Adds up the parts of dk and dv that parts of the query heads have computed. `written` are the outputs.
fn add_parts<D: Driver>(cuda: &Cuda<D>, written: [Argument; 4], gradients: [&Out; 2]) -> Result {
    let [of_dk, of_dv] = gradients.map(Out::elements);
    let mut extent = Extent::flat(of_dk.max(of_dv));
    extent.grid[1] = 2;
    let [dk, dv, partial, parts] = written;
    let arguments = arguments![dk, dv, partial, parts, of_dk, of_dv];
    let kernel = kernel!("flash_attention", "flash_add_parts", gradients[0].dtype());
    cuda.launch(kernel, extent, &arguments)
}

/// The sums of `dout * out` of every query and head, `[b, heads, s]`.
fn row_sums<D: Driver>(
    cuda: &Cuda<D>,
    sums: &Out,
    dout: &In,
    out: &In,
    shape: AttentionShape,
) -> Result {
    // Lanes of a row: as many as have elements of it, at most one reduction's.
    let lanes = shape
        .v_head_dim
        .div_ceil(PACK)
        .next_power_of_two()
        .min(WARP);
    let rows = SUM_THREADS / lanes;
    let grid = [shape.batch * shape.seq, shape.heads.div_ceil(rows), 1];
    let extent = Extent::new(grid, [SUM_THREADS, 1, 1]);
    let arguments = arguments! { sums, dout, out, shape.seq, shape.heads, shape.v_head_dim, lanes };
    let kernel = kernel!("flash_attention", "flash_row_sums", dout.dtype());
    cuda.launch(kernel, extent, &arguments)
}
