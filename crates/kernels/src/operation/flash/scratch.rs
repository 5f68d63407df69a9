//! Scratch of attention that never stores the scores.

use super::{FlashAttention, FlashAttentionBackward};
use crate::{AttentionShape, Target};
use memory::DType;

/// Queries in a block on the CPU: whole vectors, and as many rows as the GEMM library multiplies with a right operand
/// that it does not copy first (eight panels of six, with AVX-512).
pub(crate) const CPU_QUERIES: usize = 48;

/// Keys in a block on the CPU: the block of scores and what it is multiplied with stay in the second-level cache.
pub(crate) const CPU_KEYS: usize = 128;

/// Parts of scratch on the CPU, and so the most tasks at a time. It is a constant, since scratch must not depend on the
/// number of threads.
const CPU_SLOTS: usize = 32;

/// Blocks of the pass for dk and dv on CUDA that are enough for any device: two on each of an H100's 132
/// multiprocessors at a time, and as many again, since the last keys have far fewer queries than the first. More cost
/// scratch.
const CUDA_BLOCKS: usize = 512;

impl FlashAttention<'_> {
    /// The f32 elements of scratch that it needs. They depend only on the arguments, and grow at most linearly with the
    /// sequence.
    ///
    /// On CUDA it keeps its blocks in registers and shared memory and needs no scratch. On the CPU every task keeps a
    /// block of scores and of the operands multiplied with it, and at most 32 tasks run at a time.
    pub fn scratch_elements(target: Target, shape: AttentionShape, dtype: DType) -> usize {
        let tasks = shape.batch * shape.kv_heads * shape.seq.div_ceil(CPU_QUERIES);
        match target {
            Target::Cpu => cpu_slots(tasks) * cpu_forward_scratch(shape, dtype),
            Target::Cuda => 0,
        }
    }
}

impl FlashAttentionBackward<'_> {
    /// As [`FlashAttention::scratch_elements`].
    ///
    /// On CUDA it keeps the row sums of `dout * out`, `[b, heads, s]`, and where there are few key-value heads and keys
    /// for all multiprocessors, sums of `dk` and `dv` over parts of each head's query heads, for each part those like k and
    /// those like v, which are added in order. `dq` has a pass of its own, with sums in a fixed
    /// order, rather than an accumulator that blocks of keys add to in any order. On the CPU every task adds the row sums
    /// of a key-value head and, in bf16, the sums of its `dq` in f32.
    pub fn scratch_elements(target: Target, shape: AttentionShape, dtype: DType) -> usize {
        let tasks = shape.batch * shape.kv_heads;
        match target {
            Target::Cpu => cpu_slots(tasks) * cpu_backward_scratch(shape, dtype),
            Target::Cuda => {
                let row_sums = shape.batch * shape.heads * shape.seq;
                cuda_partial_sums(shape, dtype) + row_sums
            }
        }
    }
}

/// Keys in a block of the backward pass on CUDA: `Sizes::KEYS` in `flash_attention.cu`.
pub(crate) fn cuda_keys(width: usize, dtype: DType) -> usize {
    match dtype {
        DType::F32 if width > 128 => 32,
        _ => 64,
    }
}

/// The width that CUDA's kernels pad heads to; none if no kernel is as wide. Only the kernels for the widest heads take
/// different widths of keys and values.
pub(crate) fn cuda_width(shape: AttentionShape) -> Option<usize> {
    const WIDTHS: [usize; 4] = [32, 64, 128, 256];
    let [qk, v] = shape.head_dims();
    let fits = |width: &usize| qk.max(v) <= *width && (qk == v || *width == 256);
    WIDTHS.into_iter().find(fits)
}

/// Parts into which the query heads of each key-value head are divided on CUDA, as equally as possible. Each sums its
/// own `dk` and `dv`. They are as few as give enough blocks. They depend on the shape and not on the device, and so do
/// the bits of the sums.
pub(crate) fn cuda_parts(shape: AttentionShape, dtype: DType) -> usize {
    let width = cuda_width(shape).unwrap_or(usize::MAX);
    let keys = shape.seq.div_ceil(cuda_keys(width, dtype));
    let blocks = shape.batch * shape.kv_heads * keys;
    CUDA_BLOCKS.div_ceil(blocks.max(1)).min(shape.group())
}

/// The f32 elements of the sums of all parts; none if one part has all query heads.
pub(crate) fn cuda_partial_sums(shape: AttentionShape, dtype: DType) -> usize {
    match cuda_parts(shape, dtype) {
        1 => 0,
        parts => parts * (elements(shape.k()) + elements(shape.v())),
    }
}

fn elements([rows, width]: [usize; 2]) -> usize {
    rows * width
}

/// Parts of scratch on the CPU: one per task, up to a limit.
pub(crate) fn cpu_slots(tasks: usize) -> usize {
    tasks.min(CPU_SLOTS)
}

/// Queries and keys of the largest block on the CPU; queries in whole vectors.
pub(crate) fn cpu_block(shape: AttentionShape) -> (usize, usize) {
    let queries = CPU_QUERIES.min(shape.seq.next_multiple_of(16));
    (queries, CPU_KEYS.min(shape.seq))
}

/// Elements of f32 copies, which only other types need.
fn widened(dtype: DType, elements: usize) -> usize {
    if dtype == DType::F32 { 0 } else { elements }
}

/// Scratch of one task of the forward pass on the CPU: scores, sums of out, three statistics, transposed q; k and v.
fn cpu_forward_scratch(shape: AttentionShape, dtype: DType) -> usize {
    let (queries, keys) = cpu_block(shape);
    let dims = shape.qk_head_dim + shape.v_head_dim;
    keys * queries + queries * dims + 3 * queries + widened(dtype, keys * dims)
}

/// Scratch of one task of the backward pass on the CPU: scores and their gradients, sums of dk and dv, transposed k and
/// v, row sums; q, dout, k and the sums of dq.
fn cpu_backward_scratch(shape: AttentionShape, dtype: DType) -> usize {
    let (queries, keys) = cpu_block(shape);
    let rows = shape.group() * shape.seq;
    let dims = shape.qk_head_dim + shape.v_head_dim;
    let copies = queries * dims + (keys + rows) * shape.qk_head_dim;
    2 * keys * queries + 2 * keys * dims + rows + widened(dtype, copies)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape = AttentionShape::new([2, 1024], [8, 2], 64);

    /// Forward and backward.
    fn of_both(target: Target, shape: AttentionShape, dtype: DType) -> [usize; 2] {
        [
            FlashAttention::scratch_elements(target, shape, dtype),
            FlashAttentionBackward::scratch_elements(target, shape, dtype),
        ]
    }

    #[test]
    fn scratch_is_at_most_linear_in_the_sequence() {
        for target in [Target::Cpu, Target::Cuda] {
            for dtype in [DType::F32, DType::BF16] {
                let mut before = of_both(target, SHAPE, dtype);
                for seq in [2048, 4096, 8192, 16384] {
                    let now = of_both(target, AttentionShape { seq, ..SHAPE }, dtype);
                    let grown = now[0] > 2 * before[0] || now[1] > 2 * before[1];
                    assert!(!grown, "{target:?} {dtype:?} {seq}");
                    before = now;
                }
            }
        }
    }

    #[test]
    fn cuda_keeps_row_sums_and_what_parts_of_a_group_leave() {
        // Batch, sequence, heads, key-value heads, and parts: few blocks for a group of 6; of 7, which is not divided
        // evenly; fewer heads than parts would be; enough blocks; no group.
        let cases = [
            ([8, 1024, 12, 2], 2),
            ([8, 1024, 14, 2], 2),
            ([1, 1024, 8, 2], 4),
            ([1, 8192, 32, 8], 1),
            ([1, 64, 4, 4], 1),
        ];
        for ([batch, seq, heads, kv_heads], parts) in cases {
            let shape = AttentionShape::new([batch, seq], [heads, kv_heads], 128);
            for dtype in [DType::F32, DType::BF16] {
                assert_eq!(cuda_parts(shape, dtype), parts, "{shape:?}");
                let like_k = batch * seq * kv_heads * 128;
                let partial = if parts == 1 { 0 } else { 2 * parts * like_k };
                let row_sums = batch * heads * seq;
                let elements = of_both(Target::Cuda, shape, dtype);
                assert_eq!(elements, [0, partial + row_sums], "{shape:?}");
            }
        }
    }
}
