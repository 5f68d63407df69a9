//! Scratch of attention that never stores the scores.

use super::{FlashAttention, FlashAttentionBackward};
use crate::{AttentionShape, Target};
use memory::DType;

/// Queries in a block on the CPU: whole vectors, and as many rows as the GEMM library multiplies with a right operand
/// that it does not copy first (eight panels of six, with AVX-512).
pub(crate) const CPU_QUERIES: usize = 48;

/// Keys in a block on the CPU: the block of scores and what it is multiplied with stay in the second-level cache.
pub(crate) const CPU_KEYS: usize = 128;

/// Pieces of scratch on the CPU, and so the most tasks at a time. A constant, since scratch must not depend on the
/// number of threads.
const CPU_SLOTS: usize = 32;

impl FlashAttention<'_> {
    /// The f32 elements of scratch that it needs: a function of these alone, at most linear in the sequence.
    ///
    /// On CUDA it keeps its blocks in registers and shared memory and needs none. On the CPU every task keeps a block of
    /// scores and of what is multiplied with it, and there are at most 32 tasks at a time.
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
    /// On CUDA it keeps the row sums of `dout * out`, `[b, heads, s]`; `dq` has a pass of its own, with sums in a fixed
    /// order, rather than an accumulator that blocks of keys add to in any order. On the CPU every task adds the row sums
    /// of a key-value head and, in bf16, the sums of its `dq` in f32.
    pub fn scratch_elements(target: Target, shape: AttentionShape, dtype: DType) -> usize {
        let tasks = shape.batch * shape.kv_heads;
        match target {
            Target::Cpu => cpu_slots(tasks) * cpu_backward_scratch(shape, dtype),
            Target::Cuda => shape.batch * shape.heads * shape.seq,
        }
    }
}

/// Pieces of scratch on the CPU: one for every task, up to a limit.
pub(crate) fn cpu_slots(tasks: usize) -> usize {
    tasks.min(CPU_SLOTS)
}

/// Queries and keys of the largest block on the CPU; queries in whole vectors.
pub(crate) fn cpu_block(shape: AttentionShape) -> (usize, usize) {
    let queries = CPU_QUERIES.min(shape.seq.next_multiple_of(16));
    (queries, CPU_KEYS.min(shape.seq))
}

/// Elements of copies in f32, which other types need.
fn widened(dtype: DType, elements: usize) -> usize {
    if dtype == DType::F32 { 0 } else { elements }
}

/// Scratch of one task of the forward pass on the CPU: scores, sums of out, three statistics, transposed q; k and v.
fn cpu_forward_scratch(shape: AttentionShape, dtype: DType) -> usize {
    let (queries, keys) = cpu_block(shape);
    let copies = widened(dtype, 2 * keys * shape.head_dim);
    keys * queries + 2 * queries * shape.head_dim + 3 * queries + copies
}

/// Scratch of one task of the backward pass on the CPU: scores and their gradients, sums of dk and dv, transposed k and
/// v, row sums; q, dout, k and the sums of dq.
fn cpu_backward_scratch(shape: AttentionShape, dtype: DType) -> usize {
    let (queries, keys) = cpu_block(shape);
    let rows = shape.group() * shape.seq;
    let copies = (2 * queries + keys + rows) * shape.head_dim;
    2 * keys * queries + 4 * keys * shape.head_dim + rows + widened(dtype, copies)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape = AttentionShape {
        batch: 2,
        seq: 1024,
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
    };

    /// Forward and backward.
    fn elements(target: Target, shape: AttentionShape, dtype: DType) -> [usize; 2] {
        [
            FlashAttention::scratch_elements(target, shape, dtype),
            FlashAttentionBackward::scratch_elements(target, shape, dtype),
        ]
    }

    #[test]
    fn scratch_is_at_most_linear_in_the_sequence() {
        for target in [Target::Cpu, Target::Cuda] {
            for dtype in [DType::F32, DType::BF16] {
                let mut before = elements(target, SHAPE, dtype);
                for seq in [2048, 4096, 8192, 16384] {
                    let now = elements(target, AttentionShape { seq, ..SHAPE }, dtype);
                    let grown = now[0] > 2 * before[0] || now[1] > 2 * before[1];
                    assert!(!grown, "{target:?} {dtype:?} {seq}");
                    before = now;
                }
            }
        }
    }

    #[test]
    fn cuda_keeps_the_row_sums_alone() {
        for dtype in [DType::F32, DType::BF16] {
            let elements = elements(Target::Cuda, SHAPE, dtype);
            assert_eq!(elements, [0, 2 * 8 * 1024]);
        }
    }
}
