//! Kernels of flash attention for all GPUs: `flash_attention.cu`.

use super::{Pass, Passes};
use crate::cuda::extent::WARP;
use crate::cuda::{Kernel, kernel, no_kernel};
use crate::{AttentionShape, KernelError, Result};
use memory::DType;

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
pub(super) fn block_keys(width: usize, dtype: DType) -> usize {
    match dtype {
        DType::F32 if width > 128 => 32,
        _ => 64,
    }
}

/// The width that CUDA's kernels pad heads to; none if no kernel is as wide. Only the kernels for the widest heads take
/// different widths of keys and values, and caps.
pub(super) fn kernel_width(shape: AttentionShape) -> Option<usize> {
    const WIDTHS: [usize; 4] = [32, 64, 128, 256];
    let [qk, v] = shape.head_dims();
    let is_plain = qk == v && shape.cap.is_none();
    let fits = |width: &usize| qk.max(v) <= *width && (is_plain || *width == 256);
    WIDTHS.into_iter().find(fits)
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

    /// A pass whose blocks keep `rows` rows, those of a warp each for so many warps, and all in all `tile_rows` in shared memory.
    fn pass(&self, kernel: Kernel, rows: usize, warps_of_rows: usize, tile_rows: usize) -> Pass {
        /// A row has a chunk of padding.
        const CHUNK: usize = 16;
        Pass {
            kernel,
            rows,
            threads: rows / self.warp_rows * warps_of_rows * WARP,
            shared_bytes: tile_rows * (self.width * self.dtype.size_in_bytes() + CHUNK),
        }
    }

    fn passes(&self) -> Passes {
        let Sizes {
            width,
            dtype,
            queries,
            keys,
            forward,
            backward,
            ..
        } = *self;
        Passes {
            forward: self.pass(
                kernel_of_width!("flash_forward", width, dtype),
                queries,
                1,
                queries + 2 * forward,
            ),
            query_gradients: self.pass(
                kernel_of_width!("flash_backward_queries", width, dtype),
                queries,
                1,
                2 * queries + 3 * backward,
            ),
            key_gradients: self.pass(
                kernel_of_width!("flash_backward_keys", width, dtype),
                keys,
                self.key_warps,
                2 * keys + 4 * backward,
            ),
        }
    }
}

/// The passes for a shape and a type.
///
/// # Errors
/// [`KernelError`] if no kernel is as wide as its heads.
pub(super) fn passes(
    operation: &'static str,
    shape: AttentionShape,
    dtype: DType,
) -> Result<Passes> {
    Ok(Sizes::new(operation, shape, dtype)?.passes())
}

/// The most shared memory of a block of flash attention by the kernels for all GPUs, forward and backward, in bytes; none if no kernel is
/// as wide.
pub fn flash_shared_bytes(shape: AttentionShape, dtype: DType) -> Option<usize> {
    let sizes = Sizes::new("flash_attention", shape, dtype).ok()?;
    let passes = sizes.passes();
    // The kernels declare more shared memory: numbers for each row, and P on its way between warps that share keys.
    let of_keys = 4 * sizes.keys * sizes.backward + 24 * sizes.backward;
    Some([
        passes.forward.shared_bytes + 4 * sizes.queries,
        passes.query_gradients.shared_bytes + 12 * sizes.queries,
        passes.key_gradients.shared_bytes + of_keys,
    ])
    .map(|bytes| bytes.into_iter().max().unwrap_or(0))
}
