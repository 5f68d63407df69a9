//! Shapes and scratch of the attention operations.

use crate::Target;
use memory::DType;

/// Query rows that the CPU works on at a time.
pub(crate) const CPU_ROW_BLOCK: usize = 64;

/// The shape of causal self-attention with grouped queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens in each.
    pub seq: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl AttentionShape {
    /// Query heads served by one key-value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Scores are multiplied by this.
    pub fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Shape of the stored probabilities.
    pub fn probs(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq, self.seq]
    }
}

/// Which attention operation needs scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Forward, with or without room for the probabilities.
    Forward {
        /// The caller keeps the probabilities.
        probs_kept: bool,
    },
    /// Backward.
    Backward,
}

/// The f32 elements of scratch that attention needs: a function of target, shape and type alone.
pub fn scratch_elements(target: Target, shape: AttentionShape, dtype: DType, pass: Pass) -> usize {
    match target {
        Target::Cpu => shape.batch * shape.kv_heads * cpu_task_scratch(shape, dtype, pass),
        Target::Cuda => match pass {
            Pass::Forward { .. } => cuda_scores(shape),
            Pass::Backward => {
                cuda_scores(shape).next_multiple_of(64) + cuda_gradient_sums(shape, dtype)
            }
        },
    }
}

/// The scores of one sequence, which CUDA keeps in f32.
pub(crate) fn cuda_scores(shape: AttentionShape) -> usize {
    shape.heads * shape.seq * shape.seq
}

/// Sums of dk and dv of one sequence, which CUDA keeps in f32 where bf16 would round each query head's part.
pub(crate) fn cuda_gradient_sums(shape: AttentionShape, dtype: DType) -> usize {
    match dtype {
        DType::BF16 if shape.group() > 1 => 2 * shape.seq * shape.kv_heads * shape.head_dim,
        _ => 0,
    }
}

/// Scratch of one task on the CPU: one key-value head of one sequence.
pub(crate) fn cpu_task_scratch(shape: AttentionShape, dtype: DType, pass: Pass) -> usize {
    let rows = CPU_ROW_BLOCK.min(shape.seq);
    let scores = rows * shape.seq;
    let row_panel = rows * shape.head_dim;
    let full_panel = shape.seq * shape.head_dim;
    match (dtype, pass) {
        (DType::F32, Pass::Forward { probs_kept: true }) => 0,
        (DType::F32, _) => scores,
        // bf16 is widened: q and out by rows, k and v whole.
        (_, Pass::Forward { .. }) => scores + 2 * row_panel + 2 * full_panel,
        // Probabilities and scores, q, dout and dq by rows, k, v, dk and dv whole.
        (_, Pass::Backward) => 2 * scores + 3 * row_panel + 4 * full_panel,
    }
}
