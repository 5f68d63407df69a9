//! The scratch of operations, which each device says for itself.

use crate::operation::{
    Attention, AttentionBackward, AttentionShape, DeltaShape, ExpertRows, FlashAttention,
    FlashAttentionBackward, GatedDelta, GatedDeltaBackward, Operation,
};
use crate::{KernelError, Result, Target, cpu, cuda};
use memory::DType;

impl Attention<'_> {
    /// The f32 elements of scratch that it needs, where the probabilities are kept or not: a function of these alone.
    pub fn scratch_elements(
        target: Target,
        shape: AttentionShape,
        dtype: DType,
        probs_kept: bool,
    ) -> usize {
        match target {
            Target::Cpu => {
                shape.batch
                    * shape.kv_heads
                    * cpu::attention::forward_scratch(shape, dtype, probs_kept)
            }
            Target::Cuda => cuda::attention::scores(shape),
        }
    }
}

impl AttentionBackward<'_> {
    /// The f32 elements of scratch that it needs, where the gradient of sinks is asked for or not: a function of these alone. That
    /// gradient follows from a number for each query of each head.
    pub fn scratch_elements(
        target: Target,
        shape: AttentionShape,
        dtype: DType,
        with_dsinks: bool,
    ) -> usize {
        let row_sums = match with_dsinks {
            true => shape.statistics().iter().product(),
            false => 0,
        };
        let of_scores = match target {
            Target::Cpu => {
                shape.batch * shape.kv_heads * cpu::attention::backward_scratch(shape, dtype)
            }
            Target::Cuda => cuda::attention::backward_scratch(shape, dtype),
        };
        of_scores + row_sums
    }
}

impl FlashAttention<'_> {
    /// The f32 elements of scratch that it needs. They depend only on the arguments, and grow at most linearly with the
    /// sequence.
    ///
    /// On CUDA it keeps its blocks in registers and shared memory and needs no scratch. On the CPU every task keeps a
    /// block of scores and of the operands multiplied with it, and at most 32 tasks run at a time.
    pub fn scratch_elements(target: Target, shape: AttentionShape, dtype: DType) -> usize {
        let tasks = shape.batch * shape.kv_heads * shape.seq.div_ceil(cpu::flash::QUERIES);
        match target {
            Target::Cpu => cpu::flash::slots(tasks) * cpu::flash::forward_scratch(shape, dtype),
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
            Target::Cpu => cpu::flash::slots(tasks) * cpu::flash::backward_scratch(shape, dtype),
            Target::Cuda => {
                let row_sums = shape.batch * shape.heads * shape.seq;
                cuda::flash::partial_sums(shape, dtype) + row_sums
            }
        }
    }
}

impl GatedDelta<'_> {
    /// The f32 elements of scratch that it needs: a function of these alone. On the CPU the task of each sequence's key head keeps a chunk and
    /// the states of its value heads.
    pub fn scratch_elements(target: Target, shape: DeltaShape) -> usize {
        match target {
            Target::Cpu => shape.batch * shape.key_heads * cpu::gated_delta::forward_scratch(shape),
            Target::Cuda => 0,
        }
    }
}

impl GatedDeltaBackward<'_> {
    /// As [`GatedDelta::scratch_elements`]. On CUDA it keeps the gradients of all states, and sums of each chunk.
    pub fn scratch_elements(target: Target, shape: DeltaShape) -> usize {
        match target {
            Target::Cpu => {
                shape.batch * shape.key_heads * cpu::gated_delta::backward_scratch(shape)
            }
            Target::Cuda => cuda::gated_delta::backward_scratch(shape),
        }
    }
}

impl ExpertRows<'_> {
    /// The f32 elements of scratch that a product of them needs: a function of these alone. The CPU multiplies f32 by a
    /// library that wants rows at equal distances, so it gathers them.
    pub fn scratch_elements(&self, target: Target) -> usize {
        match (target, self.x.dtype(), self.row_token) {
            (Target::Cpu, DType::F32, Some(_)) => self.dims().iter().product(),
            _ => 0,
        }
    }
}

impl Operation<'_> {
    /// Refuses scratch of another size than a device needs.
    pub(crate) fn check_scratch(&self, target: Target) -> Result {
        let (scratch, elements) = match self {
            Operation::Attention(of) => {
                let (dtype, kept) = (of.q.dtype(), of.probs.is_some());
                (
                    &of.scratch,
                    Attention::scratch_elements(target, of.shape, dtype, kept),
                )
            }
            Operation::GatedDelta(of) => {
                (&of.scratch, GatedDelta::scratch_elements(target, of.shape))
            }
            Operation::GatedDeltaBackward(of) => (
                &of.scratch,
                GatedDeltaBackward::scratch_elements(target, of.shape),
            ),
            Operation::AttentionBackward(of) => {
                let (dtype, with_dsinks) = (of.q.dtype(), of.dsinks.is_some());
                (
                    &of.scratch,
                    AttentionBackward::scratch_elements(target, of.shape, dtype, with_dsinks),
                )
            }
            Operation::FlashAttention(of) => (
                &of.scratch,
                FlashAttention::scratch_elements(target, of.shape, of.q.dtype()),
            ),
            Operation::FlashAttentionBackward(of) => (
                &of.scratch,
                FlashAttentionBackward::scratch_elements(target, of.shape, of.q.dtype()),
            ),
            Operation::GroupedMatmul(of) => (&of.scratch, of.rows.scratch_elements(target)),
            Operation::GroupedGradient(of) => {
                let elements = [of.dy, of.rows].map(|rows| rows.scratch_elements(target));
                (&of.scratch, elements.iter().sum())
            }
            _ => return Ok(()),
        };
        KernelError::unless(scratch.elements() == elements, self.name(), || {
            format!("`scratch` is {:?}, expected [{elements}]", scratch.dims())
        })
    }
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
    fn the_gradient_of_sinks_takes_a_number_for_each_query_of_each_head() {
        for (target, dtype) in [(Target::Cpu, DType::F32), (Target::Cuda, DType::BF16)] {
            let of = |with| AttentionBackward::scratch_elements(target, SHAPE, dtype, with);
            assert_eq!(of(true), of(false) + 2 * 8 * 1024, "{target:?}");
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
                assert_eq!(cuda::flash::head_parts(shape, dtype), parts, "{shape:?}");
                let like_k = batch * seq * kv_heads * 128;
                let partial = if parts == 1 { 0 } else { 2 * parts * like_k };
                let row_sums = batch * heads * seq;
                let elements = of_both(Target::Cuda, shape, dtype);
                assert_eq!(elements, [0, partial + row_sums], "{shape:?}");
            }
        }
    }
}
