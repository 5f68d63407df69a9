//! Scratch of the attention operations.

use super::{Attention, AttentionBackward, AttentionShape};
use crate::Target;
use memory::DType;

/// Query rows that the CPU works on at a time.
pub(crate) const CPU_ROW_BLOCK: usize = 64;

impl Attention<'_> {
    /// The f32 elements of scratch that it needs, where the probabilities are kept or not: a function of these alone.
    pub fn scratch_elements(
        target: Target,
        shape: AttentionShape,
        dtype: DType,
        probs_kept: bool,
    ) -> usize {
        match target {
            Target::Cpu => cpu_tasks(shape) * cpu_forward_scratch(shape, dtype, probs_kept),
            Target::Cuda => cuda_scores(shape),
        }
    }
}

impl AttentionBackward<'_> {
    /// The f32 elements of scratch that it needs: a function of these alone.
    pub fn scratch_elements(target: Target, shape: AttentionShape, dtype: DType) -> usize {
        match target {
            Target::Cpu => cpu_tasks(shape) * cpu_backward_scratch(shape, dtype),
            Target::Cuda => {
                cuda_scores(shape).next_multiple_of(64) + cuda_gradient_sums(shape, dtype)
            }
        }
    }
}

/// The scores of one sequence, which CUDA keeps in f32.
pub(crate) fn cuda_scores(shape: AttentionShape) -> usize {
    shape.heads * shape.seq * shape.seq
}

/// Sums of dk and dv of one sequence, which CUDA keeps in f32 if bf16 would round each query head's part.
pub(crate) fn cuda_gradient_sums(shape: AttentionShape, dtype: DType) -> usize {
    match dtype {
        DType::BF16 if shape.group() > 1 => {
            shape.seq * shape.kv_heads * (shape.qk_head_dim + shape.v_head_dim)
        }
        _ => 0,
    }
}

/// Tasks on the CPU: one per key-value head of a sequence.
fn cpu_tasks(shape: AttentionShape) -> usize {
    shape.batch * shape.kv_heads
}

/// A block of scores; panels with as many rows, like q and like out; panels of all rows, like k and like v.
fn cpu_blocks(shape: AttentionShape) -> (usize, [usize; 2], [usize; 2]) {
    let rows = CPU_ROW_BLOCK.min(shape.seq);
    let panels = |rows| shape.head_dims().map(|dim| rows * dim);
    (rows * shape.seq, panels(rows), panels(shape.seq))
}

/// Scratch of one task of the forward pass on the CPU.
pub(crate) fn cpu_forward_scratch(shape: AttentionShape, dtype: DType, probs_kept: bool) -> usize {
    let (scores, [q, out], [k, v]) = cpu_blocks(shape);
    match dtype {
        DType::F32 if probs_kept => 0,
        DType::F32 => scores,
        // bf16 is widened: q and out by rows, k and v whole.
        _ => scores + q + out + k + v,
    }
}

/// Scratch of one task of the backward pass on the CPU.
fn cpu_backward_scratch(shape: AttentionShape, dtype: DType) -> usize {
    let (scores, [q, out], [k, v]) = cpu_blocks(shape);
    match dtype {
        DType::F32 => scores,
        // Probabilities and scores, q, dout and dq by rows, k, v, dk and dv whole.
        _ => 2 * scores + 2 * q + out + 2 * k + 2 * v,
    }
}
