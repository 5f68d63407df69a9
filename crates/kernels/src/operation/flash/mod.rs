//! Causal attention that never stores the scores (Dao et al. 2022, 2023).

mod scratch;

pub(crate) use scratch::{
    CPU_KEYS, CPU_QUERIES, cpu_block, cpu_slots, cuda_keys, cuda_partial_sums, cuda_parts,
    cuda_width,
};

use super::check::{Check, Checked, View};
use super::contract::{Contract, Operand, reads, writes};
use super::{AttentionShape, Dropout};
use memory::{DType, In, Out};

/// Causal attention that never stores the scores: blocks of them, with an online softmax. `q [b * s, heads * d]`,
/// `k [b * s, kv_heads * d]`, `v [b * s, kv_heads * e]`; `out [b * s, heads * e]`; `lse [b, heads, s]` (f32),
/// for each query the natural logarithm of the sum of e^score over the keys that it sees. Either output may be left out, which
/// changes no bit of the other. `scratch` is f32 of [`FlashAttention::scratch_elements`].
pub struct FlashAttention<'a> {
    pub out: Option<Out<'a>>,
    pub lse: Option<Out<'a>>,
    pub scratch: Out<'a>,
    pub q: In<'a>,
    pub k: In<'a>,
    pub v: In<'a>,
    pub shape: AttentionShape,
    pub options: FlashOptions<'a>,
}

/// Gradients of [`FlashAttention`]: `dq`, `dk`, `dv` from `dout`, and from the `out` and `lse` of the same inputs and
/// options. The outputs are overwritten. The
/// probabilities are recomputed, so it computes, and counts, one more product than [`super::AttentionBackward`].
pub struct FlashAttentionBackward<'a> {
    pub dq: Out<'a>,
    pub dk: Out<'a>,
    pub dv: Out<'a>,
    pub scratch: Out<'a>,
    pub dout: In<'a>,
    pub out: In<'a>,
    pub lse: In<'a>,
    pub q: In<'a>,
    pub k: In<'a>,
    pub v: In<'a>,
    pub shape: AttentionShape,
    pub options: FlashOptions<'a>,
}

/// What a query may see and keep beyond the causal mask.
#[derive(Clone, Copy, Default)]
pub struct FlashOptions<'a> {
    /// Several documents can be packed in one row: a query sees keys from the first token of its document up to itself. A window
    /// hides further keys. `[b, s]` i32: for each token the position, within its row, of that first token, at or before the token
    /// itself.
    pub documents: Option<In<'a>>,
    /// Drops attention probabilities.
    pub dropout: Option<Dropout<'a>>,
}

impl FlashOptions<'_> {
    /// Checks what [`AttentionShape::check`] does, and the options.
    fn check(
        &self,
        check: &Check,
        shape: AttentionShape,
        tensors: [&[(&str, &dyn View)]; 4],
    ) -> Checked {
        shape.check(check, tensors)?;
        if let Some(documents) = &self.documents {
            let dims = [shape.batch, shape.seq];
            check.tensor("documents", documents, &dims, DType::I32)?;
        }
        check.dropout(self.dropout)
    }
}

/// Shape of `lse`.
fn statistics(shape: AttentionShape) -> [usize; 3] {
    [shape.batch, shape.heads, shape.seq]
}

impl FlashAttention<'_> {
    fn products(&self) -> [usize; 2] {
        [1, usize::from(self.out.is_some())]
    }
}

/// Those of `AttentionBackward`, and the scores once more.
const BACKWARD_PRODUCTS: [usize; 2] = [3, 2];

impl Contract for FlashAttention<'_> {
    fn name(&self) -> &'static str {
        "flash_attention"
    }

    fn check(&self, check: &Check) -> Checked {
        let (shape, q) = (self.shape, &self.q);
        let tensors: [&[(&str, &dyn View)]; 4] =
            [&[("q", q)], &[("k", &self.k)], &[("v", &self.v)], &[]];
        self.options.check(check, shape, tensors)?;
        check.optional("out", &self.out, &shape.out(), q.dtype())?;
        check.optional("lse", &self.lse, &statistics(shape), DType::F32)?;
        let elements = FlashAttention::scratch_elements(check.target, shape, q.dtype());
        check.tensor("scratch", &self.scratch, &[elements], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let outs = self.out.iter().chain(&self.lse).map(writes);
        let ins = [self.q, self.k, self.v].map(reads);
        ins.into_iter().chain(outs).collect()
    }

    fn multiplications(&self) -> usize {
        self.shape.multiplications(self.products())
    }

    fn flops(&self) -> u64 {
        self.shape.needed_flops(self.products())
    }
}

impl Contract for FlashAttentionBackward<'_> {
    fn name(&self) -> &'static str {
        "flash_attention_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        let (shape, q) = (self.shape, &self.q);
        let tensors: [&[(&str, &dyn View)]; 4] = [
            &[("q", q), ("dq", &self.dq)],
            &[("k", &self.k), ("dk", &self.dk)],
            &[("v", &self.v), ("dv", &self.dv)],
            &[("out", &self.out), ("dout", &self.dout)],
        ];
        self.options.check(check, shape, tensors)?;
        check.tensor("lse", &self.lse, &statistics(shape), DType::F32)?;
        let elements = FlashAttentionBackward::scratch_elements(check.target, shape, q.dtype());
        check.tensor("scratch", &self.scratch, &[elements], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let ins = [self.q, self.k, self.v, self.dout, self.out, self.lse].map(reads);
        let outs = [&self.dq, &self.dk, &self.dv].map(writes);
        ins.into_iter().chain(outs).collect()
    }

    fn multiplications(&self) -> usize {
        self.shape.multiplications(BACKWARD_PRODUCTS)
    }

    fn flops(&self) -> u64 {
        self.shape.needed_flops(BACKWARD_PRODUCTS)
    }
}
