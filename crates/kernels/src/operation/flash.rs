//! Causal attention that never stores the scores (Dao et al. 2022, 2023).

use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::{Field, Visit, operation};
use super::operand::OperandRule;
use super::{AttentionShape, Dropout, Init};
use memory::{In, Out};

operation! {
    /// Causal attention that never stores the scores: blocks of them, with an online softmax. `q [b * s, heads * d]`,
    /// `k [b * s, kv_heads * d]`, `v [b * s, kv_heads * e]`; `out [b * s, heads * e]`; `lse [b, heads, s]` (f32),
    /// for each query the natural logarithm of the sum of e^score over the keys that it sees. Either output may be left out, which
    /// changes no bit of the other. `sinks` are those of [`super::Attention`], and count in `lse`. `scratch` is f32 of [`FlashAttention::scratch_elements`].
    FlashAttention "flash_attention": q {
        out: Option<Out<'a>> [..shape.out()],
        lse: Option<Out<'a>> [..shape.statistics()] f32,
        scratch: Out<'a> [scratch.elements()] f32 uncounted,
        q: In<'a> [..shape.q()],
        k: In<'a> [..shape.k()],
        v: In<'a> [..shape.v()],
        sinks: Option<In<'a>> [shape.heads],
        shape: AttentionShape,
        options: FlashOptions<'a> [shape.batch, shape.seq] i32 uncounted,
    }

    /// Gradients of [`FlashAttention`]: `dq`, `dk`, `dv` from `dout`, and from the `out` and `lse` of the same inputs and
    /// options. These outputs are overwritten. The
    /// probabilities are recomputed, so it computes, and counts, one more product than [`super::AttentionBackward`]. `dsinks` and
    /// `dsinks_init` are as there, and need `sinks`.
    FlashAttentionBackward "flash_attention_backward": q {
        dq: Out<'a> [..shape.q()],
        dk: Out<'a> [..shape.k()],
        dv: Out<'a> [..shape.v()],
        dsinks: Option<Out<'a>> [shape.heads] real plus(dsinks_init),
        dsinks_init: Init<'a> [] in_place,
        scratch: Out<'a> [scratch.elements()] f32 uncounted,
        dout: In<'a> [..shape.out()],
        out: In<'a> [..shape.out()],
        lse: In<'a> [..shape.statistics()] f32,
        q: In<'a> [..shape.q()],
        k: In<'a> [..shape.k()],
        v: In<'a> [..shape.v()],
        sinks: Option<In<'a>> [shape.heads],
        shape: AttentionShape,
        options: FlashOptions<'a> [shape.batch, shape.seq] i32 uncounted,
    }
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

impl Field for FlashOptions<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        self.documents.visit(rule.named("documents"), &mut *visit)?;
        self.dropout.visit(rule.shaped([2]).u32(), visit)
    }
}

impl FlashAttention<'_> {
    fn products(&self) -> [usize; 2] {
        [1, usize::from(self.out.is_some())]
    }
}

/// Those of `AttentionBackward`, and the scores once more.
const BACKWARD_PRODUCTS: [usize; 2] = [3, 2];

impl Contract for FlashAttention<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.shape.check(check)?;
        check.dropout(self.options.dropout)
    }

    fn multiplications(&self) -> usize {
        self.shape.multiplications(self.products())
    }

    fn flops(&self) -> u64 {
        self.shape.needed_flops(self.products())
    }
}

impl Contract for FlashAttentionBackward<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.shape.check(check)?;
        check.dropout(self.options.dropout)
    }

    fn conditions(&self, check: &Check) -> Checked {
        check.gradient_of_sinks(&self.dsinks, &self.sinks)
    }

    fn multiplications(&self) -> usize {
        self.shape.multiplications(BACKWARD_PRODUCTS)
    }

    fn flops(&self) -> u64 {
        self.shape.needed_flops(BACKWARD_PRODUCTS)
    }
}
