//! Attention that never stores the scores.
//!
//! A block of threads keeps rows of one head, and goes over tiles of other rows. Heads are padded to one of a few
//! widths that kernels exist for.

use super::dropout::dropout_arguments;
use super::extent::Extent;
use super::{Argument, Cuda, Driver, arguments, kernel, no_kernel};
use crate::operation::{FlashAttention, FlashAttentionBackward};
use crate::{AttentionShape, FlashOptions, KernelError, Result};
use memory::{DType, In, Out};

/// Threads of a block that computes sums of rows.
const SUM_THREADS: usize = 128;

/// Elements of a row that a thread reads at a time: `PACK` in `pack.cuh`.
const PACK: usize = 8;

const WARP: usize = 32;

/// The window of attention without a window: `NO_WINDOW` in `flash_attention.cu`.
const NO_WINDOW: i32 = 1 << 30;

/// Blocks of the pass for dk and dv on CUDA that are enough for any device: two on each of an H100's 132
/// multiprocessors at a time, and as many again, since the last keys have far fewer queries than the first. More cost
/// scratch.
const BLOCKS: usize = 512;

/// A kernel by its name, the width and the type.
macro_rules! kernel_of_width {
    ($name:literal, $width:expr, $dtype:expr) => {{
        use DType::{BF16, F32};
        kernel!(
            "flash_attention",
            match ($width, $dtype) {
                (32, F32) => concat!($name, "_32_f32"),
                (32, BF16) => concat!($name, "_32_bf16"),
                (64, F32) => concat!($name, "_64_f32"),
                (64, BF16) => concat!($name, "_64_bf16"),
                (128, F32) => concat!($name, "_128_f32"),
                (128, BF16) => concat!($name, "_128_bf16"),
                (_, F32) => concat!($name, "_256_f32"),
                (_, BF16) => concat!($name, "_256_bf16"),
                (_, other) => no_kernel($name, &[other]),
            }
        )
    }};
}

/// Keys in a block of the backward pass: `Sizes::KEYS` in `flash_attention.cu`.
fn block_keys(width: usize, dtype: DType) -> usize {
    match dtype {
        DType::F32 if width > 128 => 32,
        _ => 64,
    }
}

/// The width that CUDA's kernels pad heads to; none if no kernel is as wide. Only the kernels for the widest heads take
/// different widths of keys and values.
fn kernel_width(shape: AttentionShape) -> Option<usize> {
    const WIDTHS: [usize; 4] = [32, 64, 128, 256];
    let [qk, v] = shape.head_dims();
    let fits = |width: &usize| qk.max(v) <= *width && (qk == v || *width == 256);
    WIDTHS.into_iter().find(fits)
}

/// Parts into which the query heads of each key-value head are divided, as equally as possible. Each sums its
/// own `dk` and `dv`. They are as few as give enough blocks. They depend on the shape and not on the device, and so do
/// the bits of the sums.
pub(crate) fn head_parts(shape: AttentionShape, dtype: DType) -> usize {
    let width = kernel_width(shape).unwrap_or(usize::MAX);
    let keys = shape.seq.div_ceil(block_keys(width, dtype));
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

/// Rows of the tiles that kernels work on: `Sizes` in `flash_attention.cu`.
struct Sizes {
    width: usize,
    dtype: DType,
    /// Rows that a warp owns.
    warp_rows: usize,
    /// Rows that a block keeps: queries, or keys.
    queries: usize,
    keys: usize,
    /// Warps that share keys.
    key_warps: usize,
    /// Rows of a tile that a block goes over, in the forward pass.
    forward: usize,
    backward: usize,
}

impl Sizes {
    fn new(operation: &'static str, shape: AttentionShape, dtype: DType) -> Result<Sizes> {
        let width = kernel_width(shape).ok_or_else(|| {
            let head_dim = shape.qk_head_dim.max(shape.v_head_dim);
            let message = format!("heads of {head_dim} are wider than 256, the widest on CUDA");
            KernelError::too_large(operation, message)
        })?;
        let (wide, f32) = (width > 128, dtype == DType::F32);
        let warp_rows = if wide || f32 { 16 } else { 32 };
        Ok(Sizes {
            width,
            dtype,
            warp_rows,
            queries: if wide && f32 { 32 } else { 4 * warp_rows },
            keys: block_keys(width, dtype),
            key_warps: if wide && f32 { 4 } else { 2 },
            forward: if wide { 32 } else { 64 },
            backward: match (width, f32) {
                (..=128, true) => 32,
                (_, true) => 16,
                (..=64, false) => 64,
                (_, false) => 32,
            },
        })
    }

    /// Rows that a block keeps and goes over: in the forward pass, for the gradient of queries, and for those of keys and values.
    fn forward_rows(&self) -> usize {
        self.queries + 2 * self.forward
    }

    fn query_gradient_rows(&self) -> usize {
        2 * self.queries + 3 * self.backward
    }

    fn key_gradient_rows(&self) -> usize {
        2 * self.keys + 4 * self.backward
    }

    /// One block per sequence, query head and block of queries. `tile_rows` are all rows that it keeps.
    fn of_queries(&self, shape: AttentionShape, tile_rows: usize) -> Extent {
        Extent {
            grid: [shape.batch, shape.heads, shape.seq.div_ceil(self.queries)],
            block: [self.queries / self.warp_rows * WARP, 1, 1],
            shared_bytes: self.shared_bytes(tile_rows),
        }
    }

    /// As `of_queries`, with one block per part of a key-value head's query heads and per block of keys, which some
    /// warps share.
    fn of_keys(&self, shape: AttentionShape, parts: usize, tile_rows: usize) -> Extent {
        let heads = shape.kv_heads * parts;
        Extent {
            grid: [shape.batch, heads, shape.seq.div_ceil(self.keys)],
            block: [self.keys / self.warp_rows * self.key_warps * WARP, 1, 1],
            shared_bytes: self.shared_bytes(tile_rows),
        }
    }

    /// Bytes of `tile_rows` rows, each with a chunk of padding.
    fn shared_bytes(&self, tile_rows: usize) -> usize {
        const CHUNK: usize = 16;
        tile_rows * (self.width * self.dtype.size_in_bytes() + CHUNK)
    }
}

/// The most shared memory of a block of flash attention, forward and backward, in bytes; none if no kernel is as wide.
pub fn flash_shared_bytes(shape: AttentionShape, dtype: DType) -> Option<usize> {
    let sizes = Sizes::new("flash_attention", shape, dtype).ok()?;
    // Beside the rows, what the kernels declare: numbers for each row, and P on its way between warps that share keys.
    let of_keys = 4 * sizes.keys * sizes.backward + 24 * sizes.backward;
    Some([
        sizes.shared_bytes(sizes.forward_rows()) + 4 * sizes.queries,
        sizes.shared_bytes(sizes.query_gradient_rows()) + 12 * sizes.queries,
        sizes.shared_bytes(sizes.key_gradient_rows()) + of_keys,
    ])
    .map(|bytes| bytes.into_iter().max().unwrap_or(0))
}

/// The arguments of a kernel, `N` in all, without an allocation.
fn joined<const N: usize, const PARTS: usize>(parts: [&[Argument]; PARTS]) -> [Argument; N] {
    let mut all = parts.into_iter().flatten().copied();
    let joined = std::array::from_fn(|_| all.next().expect("as many as the kernel has"));
    assert!(all.next().is_none(), "as many as the kernel has");
    joined
}

/// The arguments that every kernel ends with.
fn common(shape: AttentionShape, options: &FlashOptions) -> [Argument; 11] {
    let [threshold, key, kept_scale] = dropout_arguments(options.dropout);
    let window = match shape.is_windowed() {
        true => shape.reach() as i32,
        false => NO_WINDOW,
    };
    arguments! {
        &options.documents, shape.seq, shape.heads, shape.kv_heads, shape.qk_head_dim,
        shape.v_head_dim, shape.scale(), Argument::Int(window), threshold, key, kept_scale,
    }
}

pub(super) fn flash_attention<D: Driver>(cuda: &Cuda<D>, op: FlashAttention) -> Result {
    let sizes = Sizes::new("flash_attention", op.shape, op.q.dtype())?;
    let extent = sizes.of_queries(op.shape, sizes.forward_rows());
    let operands = arguments![&op.out, &op.lse, &op.q, &op.k, &op.v];
    let arguments: [Argument; 16] = joined([&operands, &common(op.shape, &op.options)]);
    let kernel = kernel_of_width!("flash_forward", sizes.width, op.q.dtype());
    cuda.launch(kernel, extent, &arguments)
}

pub(super) fn flash_attention_backward<D: Driver>(
    cuda: &Cuda<D>,
    op: FlashAttentionBackward,
) -> Result {
    let (shape, dtype) = (op.shape, op.q.dtype());
    let sizes = Sizes::new("flash_attention_backward", shape, dtype)?;
    // The partial sums come first, because they are accessed in wide words and need alignment.
    let parts = head_parts(shape, dtype);
    let (partial, sums) = op.scratch.split_at(partial_sums(shape, dtype));
    row_sums(cuda, &sums, &op.dout, &op.out, shape)?;

    let read = arguments![&op.dout, &op.lse, &sums, &op.q, &op.k, &op.v];
    let common = common(shape, &op.options);
    let written = arguments![&op.dk, &op.dv, &partial, parts];

    let kernel = kernel_of_width!("flash_backward_keys", sizes.width, dtype);
    let extent = sizes.of_keys(shape, parts, sizes.key_gradient_rows());
    let arguments: [Argument; 21] = joined([&written, &read, &common]);
    cuda.launch(kernel, extent, &arguments)?;
    if parts > 1 {
        add_parts(cuda, written, [&op.dk, &op.dv])?;
    }

    let kernel = kernel_of_width!("flash_backward_queries", sizes.width, dtype);
    let extent = sizes.of_queries(shape, sizes.query_gradient_rows());
    let arguments: [Argument; 18] = joined([&arguments![&op.dq], &read, &common]);
    cuda.launch(kernel, extent, &arguments)
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
