//! Causal attention that never stores the scores (Dao et al. 2022, 2023).

mod cudnn;
mod scratch;

pub(crate) use cudnn::CudnnScratch;
pub use cudnn::Flash;
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
/// for each query the natural logarithm of the sum of e^score over the keys that it sees. Either output may be left out, which changes no bit of the other. `scratch` is
/// f32 of [`FlashAttention::scratch_elements`], by cuDNN of [`FlashAttention::cudnn_scratch_elements`]. By cuDNN, `q`, `k` and
/// `v` may be columns of one tensor: there may be gaps between their rows.
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
/// options. The outputs are overwritten. By cuDNN, `dq`, `dk` and `dv` have the gaps between rows of `q`, `k` and `v`. The
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

/// What a query may see and keep beyond the causal mask, and which implementation computes it.
#[derive(Clone, Copy, Default)]
pub struct FlashOptions<'a> {
    /// `[b, s]` i32: for each token the position, within its row, of the first token of its document, at or before the
    /// token itself. A query sees keys from there up to itself, so several documents can be packed in one row. A window
    /// hides further keys.
    pub documents: Option<In<'a>>,
    /// Drops attention probabilities.
    pub dropout: Option<Dropout<'a>>,
    /// The implementation. The backward pass must use the one that computed `out` and `lse`.
    pub by: Flash,
}

impl FlashOptions<'_> {
    /// Checks what [`AttentionShape::check`] does, and the options.
    fn check(
        &self,
        check: &Check,
        shape: AttentionShape,
        tensors: [&[(&str, &dyn View)]; 4],
    ) -> Checked {
        let dtype = tensors[0][0].1.view().dtype();
        if self.by == Flash::Own {
            shape.check(check, tensors)?;
        } else {
            shape.check_shapes(check, tensors)?;
            let [of_qkv @ .., of_out] = tensors;
            of_qkv
                .into_iter()
                .try_for_each(|tensors| check_rows(check, tensors))?;
            of_out
                .iter()
                .try_for_each(|(name, x)| check.contiguous(name, *x))?;
            let misfit = shape.cudnn_misfit(check.target, dtype);
            check.that(misfit.is_none(), || misfit.unwrap_or_default())?;
            let plain = self.documents.is_none() && self.dropout.is_none();
            check.that(plain, || {
                "cuDNN's attention knows neither documents nor our dropout".into()
            })?;
        }
        if let Some(documents) = &self.documents {
            let tokens = [shape.batch, shape.seq];
            check.tensor("documents", documents, &tokens, DType::I32)?;
        }
        check.dropout(self.dropout)
    }
}

/// cuDNN reads and writes rows in pieces of 16 bytes, and those of a tensor and of its gradient as far apart.
fn check_rows(check: &Check, tensors: &[(&str, &dyn View)]) -> Checked {
    const PIECE_BYTES: usize = 16;
    let stride = |x: &dyn View| x.view().strides()[0] * x.view().dtype().size_in_bytes();
    let (first, of_first) = tensors[0];
    for (name, x) in tensors {
        let start = x.view().pointer() as usize;
        let is_aligned = [start, stride(*x)].map(|bytes| bytes.is_multiple_of(PIECE_BYTES));
        check.that(is_aligned == [true; 2], || {
            format!("rows of `{name}` do not begin at multiples of {PIECE_BYTES} bytes")
        })?;
        check.that(stride(*x) == stride(of_first), || {
            format!("rows of `{name}` are not as far apart as those of `{first}`")
        })?;
    }
    Ok(())
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
        let elements = match self.options.by {
            Flash::Own => FlashAttention::scratch_elements(check.target, shape, q.dtype()),
            Flash::Cudnn => FlashAttention::cudnn_scratch_elements(
                shape,
                self.out.is_some(),
                self.lse.is_some(),
            ),
        };
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
        let elements = match self.options.by {
            Flash::Own => FlashAttentionBackward::scratch_elements(check.target, shape, q.dtype()),
            Flash::Cudnn => FlashAttentionBackward::cudnn_scratch_elements(shape),
        };
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
