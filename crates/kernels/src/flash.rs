//! Shapes, scratch and options of attention that never stores the scores.

use crate::{AttentionShape, Target};
use memory::{DType, In};

/// Queries in a block on the CPU: whole vectors, and as many rows as the GEMM library multiplies with a right operand
/// that it does not copy first (eight panels of six, with AVX-512).
pub(crate) const CPU_QUERIES: usize = 48;

/// Keys in a block on the CPU: the block of scores and what it is multiplied with stay in the second-level cache.
pub(crate) const CPU_KEYS: usize = 128;

/// Pieces of scratch on the CPU, and so the most tasks at a time. A constant, since scratch must not depend on the
/// number of threads.
pub(crate) const CPU_SLOTS: usize = 32;

/// What a query may see and keep beyond the causal mask.
#[derive(Clone, Copy, Default)]
pub struct FlashOptions<'a> {
    /// `[b, s]` i32: for each token the position, within its row, of the first token of its document, at or before the
    /// token itself. A query sees keys from there up to itself, so several documents can be packed in one row.
    pub documents: Option<In<'a>>,
    /// Drops attention probabilities.
    pub dropout: Option<Dropout>,
}

/// Dropout of attention probabilities (Srivastava et al. 2014): of the normalised ones, so the sum that normalises
/// is not dropped. Kept ones are multiplied by [`Dropout::scale`].
///
/// The number of an element is [`crate::random::random_u32`] of the key and of the element's index in `[b, heads, s, s]`,
/// `((sequence * heads + head) * s + query) * s + key_position`; it is dropped if its number is below
/// [`Dropout::threshold`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Share that is dropped, from 0 to below 1.
    pub probability: f32,
    /// Names the stream of random numbers: another one for every layer and step.
    pub key: u64,
}

impl Dropout {
    /// Random numbers below this drop their element: the probability's share of all `u32`.
    pub fn threshold(&self) -> u32 {
        (f64::from(self.probability) * (1u64 << 32) as f64) as u32
    }

    /// The factor on what is kept: 1 / (1 - probability).
    pub fn scale(&self) -> f32 {
        1.0 / (1.0 - self.probability)
    }
}

/// Which operation needs scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// [`crate::Kernels::flash_attention`].
    Forward,
    /// [`crate::Kernels::flash_attention_backward`].
    Backward,
}

/// The f32 elements of scratch that an operation needs: a function of target, shape and type alone, at most linear
/// in the sequence.
///
/// On CUDA the forward pass keeps its blocks in registers and shared memory and needs none. The backward pass keeps
/// the row sums of `dout * out`, `[b, heads, s]`; `dq` has a pass of its own, with sums in a fixed order, rather than
/// an accumulator that blocks of keys add to in any order.
///
/// On the CPU every task keeps a block of scores and of what is multiplied with it, and there are at most 32 tasks at
/// a time. The backward pass adds the row sums of a key-value head and, in bf16, the sums of its `dq` in f32.
pub fn scratch_elements(target: Target, shape: AttentionShape, dtype: DType, pass: Pass) -> usize {
    match (target, pass) {
        (Target::Cpu, pass) => cpu_slots(shape, pass) * cpu_slot_scratch(shape, dtype, pass),
        (Target::Cuda, Pass::Forward) => 0,
        (Target::Cuda, Pass::Backward) => shape.batch * shape.heads * shape.seq,
    }
}

/// Pieces of scratch on the CPU: one for every task, up to a limit.
pub(crate) fn cpu_slots(shape: AttentionShape, pass: Pass) -> usize {
    let heads = shape.batch * shape.kv_heads;
    let tasks = match pass {
        Pass::Forward => heads * shape.seq.div_ceil(CPU_QUERIES),
        Pass::Backward => heads,
    };
    tasks.min(CPU_SLOTS)
}

/// Queries and keys of the largest block on the CPU; queries in whole vectors.
pub(crate) fn cpu_block(shape: AttentionShape) -> (usize, usize) {
    let queries = CPU_QUERIES.min(shape.seq.next_multiple_of(16));
    (queries, CPU_KEYS.min(shape.seq))
}

/// Scratch of one task on the CPU.
fn cpu_slot_scratch(shape: AttentionShape, dtype: DType, pass: Pass) -> usize {
    let (queries, keys) = cpu_block(shape);
    let (query_panel, key_panel) = (queries * shape.head_dim, keys * shape.head_dim);
    let widened = |elements| if dtype == DType::F32 { 0 } else { elements };
    match pass {
        // Scores, sums of out, three statistics, transposed q; k and v.
        Pass::Forward => keys * queries + 2 * query_panel + 3 * queries + widened(2 * key_panel),
        // Scores and their gradients, sums of dk and dv, transposed k and v, row sums; q, dout, k and the sums of dq.
        Pass::Backward => {
            let rows = shape.group() * shape.seq;
            let copies = 2 * query_panel + key_panel + rows * shape.head_dim;
            2 * keys * queries + 4 * key_panel + rows + widened(copies)
        }
    }
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

    #[test]
    fn scratch_is_at_most_linear_in_the_sequence() {
        for target in [Target::Cpu, Target::Cuda] {
            for dtype in [DType::F32, DType::BF16] {
                for pass in [Pass::Forward, Pass::Backward] {
                    let mut before = scratch_elements(target, SHAPE, dtype, pass);
                    for seq in [2048, 4096, 8192, 16384] {
                        let elements =
                            scratch_elements(target, AttentionShape { seq, ..SHAPE }, dtype, pass);
                        assert!(
                            elements <= 2 * before,
                            "{target:?} {dtype:?} {pass:?} {seq}"
                        );
                        before = elements;
                    }
                }
            }
        }
    }

    #[test]
    fn cuda_keeps_the_row_sums_alone() {
        for dtype in [DType::F32, DType::BF16] {
            let elements = |pass| scratch_elements(Target::Cuda, SHAPE, dtype, pass);
            assert_eq!(elements(Pass::Forward), 0);
            assert_eq!(elements(Pass::Backward), 2 * 8 * 1024);
        }
    }

    #[test]
    fn thresholds_are_the_share_of_all_numbers() {
        let threshold = |probability| {
            Dropout {
                probability,
                key: 0,
            }
            .threshold()
        };
        assert_eq!(threshold(0.0), 0);
        assert_eq!(threshold(0.25), 1 << 30);
        assert_eq!(threshold(1.0 - f32::EPSILON / 2.0), u32::MAX - 255);
    }
}
