//! Attention that never stores the scores.
//!
//! A block of threads keeps rows of one head and lets tiles of others go by. Heads are padded to the next of a few
//! widths, for which the kernels are made.

use super::dropout::dropout_arguments;
use super::extent::Extent;
use super::{Argument, Cuda, Driver, Kernel, kernel, no_kernel};
use crate::operation::{FlashAttention, FlashAttentionBackward};
use crate::{AttentionShape, FlashOptions, KernelError};
use memory::{DType, In, Out};

/// Widths of a head that kernels are made for.
const WIDTHS: [usize; 4] = [32, 64, 128, 256];

/// Heads of a token of whose rows a block makes sums, a warp each.
const SUMS_PER_BLOCK: usize = 4;

const WARP: usize = 32;

/// A kernel by its name, followed by the width and type that it is made for.
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

/// Rows of the tiles that kernels work on: `Sizes` in `flash_attention.cu`.
struct Sizes {
    width: usize,
    dtype: DType,
    /// Rows that stay.
    rows: usize,
    /// Rows that go by.
    forward: usize,
    backward: usize,
    /// Sets of warps that share the columns of dk and dv.
    parts: usize,
}

impl Sizes {
    fn new(operation: &'static str, head_dim: usize, dtype: DType) -> Result<Sizes, KernelError> {
        let width = WIDTHS.into_iter().find(|width| head_dim <= *width);
        let width = width.ok_or_else(|| {
            let message = format!("heads of {head_dim} are wider than 256, the widest on CUDA");
            KernelError::too_large(operation, message)
        })?;
        let (wide, f32) = (width > 128, dtype == DType::F32);
        Ok(Sizes {
            width,
            dtype,
            rows: if wide && f32 { 32 } else { 64 },
            forward: if wide { 32 } else { 64 },
            backward: match (width, f32) {
                (..=128, true) => 32,
                (_, true) => 16,
                (..=64, false) => 64,
                (_, false) => 32,
            },
            parts: if wide { 2 } else { 1 },
        })
    }

    /// A block for each head and each block of rows, with as many tiles' rows in shared memory.
    fn extent(&self, heads: usize, seq: usize, parts: usize, tile_rows: usize) -> Extent {
        const CHUNK: usize = 16;
        let chunks = self.width * self.dtype.size_in_bytes() / CHUNK + 1;
        Extent {
            grid: [heads, seq.div_ceil(self.rows), 1],
            block: [self.rows / 16 * WARP * parts, 1, 1],
            shared_bytes: tile_rows * chunks * CHUNK,
        }
    }
}

/// The arguments of a kernel, `N` in all, without an allocation.
fn joined<const N: usize>(parts: [&[Argument]; 3]) -> [Argument; N] {
    let mut all = parts.into_iter().flatten().copied();
    let joined = std::array::from_fn(|_| all.next().expect("as many as the kernel has"));
    assert!(all.next().is_none(), "as many as the kernel has");
    joined
}

/// The arguments that every kernel ends with.
fn common(shape: AttentionShape, options: &FlashOptions) -> [Argument; 9] {
    let [threshold, key, kept_scale] = dropout_arguments(options.dropout);
    [
        options
            .documents
            .as_ref()
            .map_or(Argument::Pointer(std::ptr::null()), Argument::from),
        shape.seq.into(),
        shape.heads.into(),
        shape.kv_heads.into(),
        shape.head_dim.into(),
        shape.scale().into(),
        threshold,
        key,
        kept_scale,
    ]
}

pub(super) fn flash_attention<D: Driver>(
    cuda: &Cuda<D>,
    operation: FlashAttention,
) -> Result<(), KernelError> {
    let FlashAttention {
        out,
        lse,
        scratch: _,
        q,
        k,
        v,
        shape,
        options,
    } = operation;
    let sizes = Sizes::new("flash_attention", shape.head_dim, q.dtype())?;
    let heads = shape.batch * shape.heads;
    let extent = sizes.extent(heads, shape.seq, 1, sizes.rows + 2 * sizes.forward);
    let written = [Argument::optional(&out), Argument::optional(&lse)];
    let read = [&q, &k, &v].map(Argument::from);
    let arguments: [Argument; 14] = joined([&written, &read, &common(shape, &options)]);
    let kernel = kernel_of_width!("flash_forward", sizes.width, q.dtype());
    cuda.launch(kernel, extent, &arguments)
}

pub(super) fn flash_attention_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: FlashAttentionBackward,
) -> Result<(), KernelError> {
    let FlashAttentionBackward {
        dq,
        dk,
        dv,
        scratch,
        dout,
        out,
        lse,
        q,
        k,
        v,
        shape,
        options,
    } = operation;
    let dtype = q.dtype();
    let sizes = Sizes::new("flash_attention_backward", shape.head_dim, dtype)?;
    row_sums(cuda, &scratch, &dout, &out, shape)?;

    let [dout, lse, scratch] = [(&dout).into(), (&lse).into(), (&scratch).into()];
    let [q, k, v] = [&q, &k, &v].map(Argument::from);
    let read = [dout, lse, scratch, q, k, v];
    let common = common(shape, &options);
    let tile_rows = 2 * sizes.rows + 4 * sizes.backward;

    let kernel = kernel_of_width!("flash_backward_keys", sizes.width, dtype);
    let heads = shape.batch * shape.kv_heads;
    let extent = sizes.extent(heads, shape.seq, sizes.parts, tile_rows);
    let written = [(&dk).into(), (&dv).into()];
    let arguments: [Argument; 17] = joined([&written, &read, &common]);
    cuda.launch(kernel, extent, &arguments)?;

    let kernel = kernel_of_width!("flash_backward_queries", sizes.width, dtype);
    let extent = sizes.extent(shape.batch * shape.heads, shape.seq, 1, tile_rows);
    let arguments: [Argument; 16] = joined([&[(&dq).into()], &read, &common]);
    cuda.launch(kernel, extent, &arguments)
}

/// The sums of `dout * out` of every query and head, `[b, heads, s]`.
fn row_sums<D: Driver>(
    cuda: &Cuda<D>,
    sums: &Out,
    dout: &In,
    out: &In,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    let extent = Extent {
        grid: [
            shape.batch * shape.seq,
            shape.heads.div_ceil(SUMS_PER_BLOCK),
            1,
        ],
        block: [SUMS_PER_BLOCK * WARP, 1, 1],
        shared_bytes: 0,
    };
    let arguments = [
        sums.into(),
        dout.into(),
        out.into(),
        shape.seq.into(),
        shape.heads.into(),
        shape.head_dim.into(),
    ];
    let kernel = kernel!("flash_attention", "flash_row_sums", dout.dtype());
    cuda.launch(kernel, extent, &arguments)
}
