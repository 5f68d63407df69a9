//! Causal attention that never stores the scores (Dao et al. 2022, 2023).

mod cudnn;
mod ragged;
mod scratch;

pub(crate) use cudnn::CudnnScratch;
pub use cudnn::Flash;
pub use ragged::RaggedDocuments;
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
/// for each query the natural logarithm of the sum of e^score over the keys that it sees; by cuDNN, where documents are packed, its
/// elements are in the order of `[b, s, heads]`. Either output may be left out, which changes no bit of the other. `scratch` is
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
    /// Several documents can be packed in one row: a query sees keys from the first token of its document up to itself. A window
    /// hides further keys. Our own kernels take `[b, s]` i32: for each token the position, within its row, of that first token, at
    /// or before the token itself. cuDNN takes [`RaggedDocuments`].
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
            check.that(self.dropout.is_none(), || {
                "cuDNN's attention does not know our dropout".into()
            })?;
        }
        if let Some(documents) = &self.documents {
            let dims = match self.by {
                Flash::Own => [shape.batch, shape.seq],
                Flash::Cudnn => {
                    check_documents(check, shape, tensors)?;
                    RaggedDocuments::dims(shape)
                }
            };
            check.tensor("documents", documents, &dims, DType::I32)?;
        }
        check.dropout(self.dropout)
    }

    /// Scratch of a pass, by whichever implementation.
    fn scratch_elements(&self, own: impl Fn() -> usize, cudnn: impl Fn(bool) -> usize) -> usize {
        match self.by {
            Flash::Own => own(),
            Flash::Cudnn => cudnn(self.documents.is_some()),
        }
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

/// cuDNN finds documents in rows of queries, keys and values that have no gaps.
fn check_documents(
    check: &Check,
    shape: AttentionShape,
    tensors: [&[(&str, &dyn View)]; 4],
) -> Checked {
    let mut tensors = tensors.into_iter().flatten();
    tensors.try_for_each(|(name, x)| check.contiguous(name, *x))?;
    let misfit = shape.documents_misfit();
    check.that(misfit.is_none(), || misfit.unwrap_or_default())
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
        let has_outputs = [self.out.is_some(), self.lse.is_some()];
        let elements = self.options.scratch_elements(
            || FlashAttention::scratch_elements(check.target, shape, q.dtype()),
            |documents| FlashAttention::cudnn_scratch_elements(shape, documents, has_outputs),
        );
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
        let elements = self.options.scratch_elements(
            || FlashAttentionBackward::scratch_elements(check.target, shape, q.dtype()),
            |documents| FlashAttentionBackward::cudnn_scratch_elements(shape, documents),
        );
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
