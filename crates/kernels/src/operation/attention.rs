//! Causal attention with stored probabilities.

use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use super::{Dropout, Init};
use memory::{In, Out};

operation! {
    /// Causal attention with stored probabilities. `q [b * s, heads * d]`, `k [b * s, kv_heads * d]`, `v [b * s, kv_heads * e]`;
    /// `out [b * s, heads * e]`; `probs [b, heads, s, s]`, zero for keys that a query does not see and not dropped. Either output
    /// may be left out. `scratch` is f32 of [`Attention::scratch_elements`].
    ///
    /// `sinks [heads]`: a learned logit of each head, which counts in the sum of every row and has no value (gpt-oss 2025). With them
    /// `lse [b, heads, s]` (f32) can be asked for: the natural logarithm of e^sink + the sum of e^score.
    Attention "attention": q {
        out: Option<Out<'a>> [..shape.out()],
        probs: Option<Out<'a>> [..shape.probs()],
        lse: Option<Out<'a>> [..shape.statistics()] f32,
        scratch: Out<'a> [scratch.elements()] f32 uncounted,
        q: In<'a> [..shape.q()],
        k: In<'a> [..shape.k()],
        v: In<'a> [..shape.v()],
        sinks: Option<In<'a>> [shape.heads],
        shape: AttentionShape,
        dropout: Option<Dropout<'a>> [2] u32 uncounted,
    }

    /// Gradients of [`Attention`]: `dq`, `dk`, `dv` from `dout` and `probs`, with the same dropout. These outputs are
    /// overwritten. `dsinks [heads] = dsinks_init` - the sums of e^(sink - lse) (dout . out) over all sequences and queries: a
    /// gradient, f32 or bf16, rounded once. It needs `sinks` and their `lse`.
    AttentionBackward "attention_backward": q {
        dq: Out<'a> [..shape.q()],
        dk: Out<'a> [..shape.k()],
        dv: Out<'a> [..shape.v()],
        dsinks: Option<Out<'a>> [shape.heads] real plus(dsinks_init),
        dsinks_init: Init<'a> [] in_place,
        scratch: Out<'a> [scratch.elements()] f32 uncounted,
        dout: In<'a> [..shape.out()],
        probs: In<'a> [..shape.probs()],
        lse: Option<In<'a>> [..shape.statistics()] f32,
        q: In<'a> [..shape.q()],
        k: In<'a> [..shape.k()],
        v: In<'a> [..shape.v()],
        sinks: Option<In<'a>> [shape.heads],
        shape: AttentionShape,
        dropout: Option<Dropout<'a>> [2] u32 uncounted,
    }
}

/// The shape of causal self-attention with grouped queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens in each.
    pub seq: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head of queries, and of one of keys.
    pub qk_head_dim: usize,
    /// Width of a head of values, and of one of the output.
    pub v_head_dim: usize,
    /// The most keys that a query sees, its own included: those up to itself (sliding-window attention, Beltagy et al.
    /// 2020). None: all up to itself.
    pub window: Option<usize>,
    /// The factor on attention scores; `None` is 1 / sqrt(`qk_head_dim`).
    pub scale: Option<Positive>,
    /// A soft cap on scores (Gemma 2 2024): a score s, scaled, becomes cap tanh(s / cap) before keys are hidden. `None`: scores stay.
    pub cap: Option<Positive>,
}

/// A positive number, by its bits, so that shapes can be compared and hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Positive(u32);

impl Positive {
    /// This number.
    pub const fn new(number: f32) -> Positive {
        Positive(number.to_bits())
    }

    /// The number.
    pub const fn get(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl AttentionShape {
    /// A shape with equal widths of all heads, the usual scale, no window and no cap.
    pub const fn new(
        [batch, seq]: [usize; 2],
        [heads, kv_heads]: [usize; 2],
        head_dim: usize,
    ) -> AttentionShape {
        AttentionShape {
            batch,
            seq,
            heads,
            kv_heads,
            qk_head_dim: head_dim,
            v_head_dim: head_dim,
            window: None,
            scale: None,
            cap: None,
        }
    }

    /// The most keys that a query of a whole sequence sees: the window, or all of a shorter sequence.
    pub fn reach(&self) -> usize {
        self.window.unwrap_or(self.seq).min(self.seq)
    }

    /// Whether the window hides keys from some query.
    pub fn is_windowed(&self) -> bool {
        self.reach() < self.seq
    }

    /// The first key in the window of a query.
    pub fn first_in_window(&self, query: usize) -> usize {
        (query + 1).saturating_sub(self.reach())
    }

    /// Query heads served by one key-value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Scores are multiplied by this.
    pub fn scale(&self) -> f32 {
        let usual = || 1.0 / (self.qk_head_dim as f32).sqrt();
        self.scale.map_or_else(usual, Positive::get)
    }

    /// Width of a head of queries or keys, and of one of values.
    pub(crate) fn head_dims(&self) -> [usize; 2] {
        [self.qk_head_dim, self.v_head_dim]
    }

    /// Shape of the queries.
    pub fn q(&self) -> [usize; 2] {
        [self.batch * self.seq, self.heads * self.qk_head_dim]
    }

    /// Shape of the keys.
    pub fn k(&self) -> [usize; 2] {
        [self.batch * self.seq, self.kv_heads * self.qk_head_dim]
    }

    /// Shape of the values.
    pub fn v(&self) -> [usize; 2] {
        [self.batch * self.seq, self.kv_heads * self.v_head_dim]
    }

    /// Shape of the output.
    pub fn out(&self) -> [usize; 2] {
        [self.batch * self.seq, self.heads * self.v_head_dim]
    }

    /// Shape of the stored probabilities.
    pub fn probs(&self) -> [usize; 4] {
        [self.batch, self.heads, self.seq, self.seq]
    }

    /// Shape of a number for each query of each head.
    pub fn statistics(&self) -> [usize; 3] {
        [self.batch, self.heads, self.seq]
    }

    /// Multiplications of products of all scores with heads of keys and of values, without regard to causality: twice
    /// those of the keys up to the query. A window of `w` keys has `w (2 s - w)` scores instead of `s s`.
    pub(super) fn multiplications(&self, products: [usize; 2]) -> usize {
        self.multiplications_of_a_column(products) * (2 * self.seq - self.reach())
    }

    /// The operations that these products need. `s` queries that see up to `w` keys have `w s - w (w - 1) / 2` scores.
    /// It is added up in parts, since the product would exceed 2^64 for long sequences.
    pub(super) fn needed_flops(&self, products: [usize; 2]) -> u64 {
        (self.multiplications(products) + self.multiplications_of_a_column(products)) as u64
    }

    /// Multiplications of the scores of one query with all keys in its reach, in every head of every sequence.
    fn multiplications_of_a_column(&self, [of_keys, of_values]: [usize; 2]) -> usize {
        let width = of_keys * self.qk_head_dim + of_values * self.v_head_dim;
        self.batch * self.heads * self.reach() * width
    }

    /// Refuses numbers that are no attention's.
    pub(super) fn check(&self, check: &Check) -> Checked {
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        check.that(kv_heads > 0 && heads.is_multiple_of(kv_heads), || {
            format!("{heads} heads do not divide into {kv_heads} groups")
        })?;
        check.that(self.window != Some(0), || {
            "a window of no keys leaves a query without any".into()
        })?;
        let scale = self.scale();
        check.that(scale.is_finite() && scale > 0.0, || {
            format!("scores are multiplied by a positive number, not {scale}")
        })?;
        let cap = self.cap.map_or(1.0, Positive::get);
        check.that(cap.is_finite() && cap > 0.0, || {
            format!("scores are capped at a positive number, not {cap}")
        })
    }
}

impl Check {
    /// Refuses a gradient of sinks that are not there.
    pub(super) fn gradient_of_sinks(&self, dsinks: &Option<Out>, sinks: &Option<In>) -> Checked {
        self.that(dsinks.is_none() || sinks.is_some(), || {
            "`dsinks` is the gradient of `sinks`, and there are none".into()
        })
    }
}

impl Attention<'_> {
    fn products(&self) -> [usize; 2] {
        [1, usize::from(self.out.is_some())]
    }
}

impl AttentionBackward<'_> {
    /// Gradients of dq and dk, and of the probabilities and dv; the scores once more where a cap's slope follows from them.
    fn products(&self) -> [usize; 2] {
        [2 + usize::from(self.shape.cap.is_some()), 2]
    }
}

impl Contract for Attention<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.shape.check(check)?;
        check.dropout(self.dropout)
    }

    fn conditions(&self, check: &Check) -> Checked {
        check.that(self.lse.is_none() || self.sinks.is_some(), || {
            "`lse` is asked for, which only sinks need, and there are no `sinks`".into()
        })
    }

    fn multiplications(&self) -> usize {
        self.shape.multiplications(self.products())
    }

    fn flops(&self) -> u64 {
        self.shape.needed_flops(self.products())
    }
}

impl Contract for AttentionBackward<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.shape.check(check)?;
        check.dropout(self.dropout)
    }

    fn conditions(&self, check: &Check) -> Checked {
        check.gradient_of_sinks(&self.dsinks, &self.sinks)?;
        check.that(self.lse.is_some() == self.sinks.is_some(), || {
            "`sinks` and `lse` are given together: the gradient of sinks follows from both".into()
        })
    }

    fn multiplications(&self) -> usize {
        self.shape.multiplications(self.products())
    }

    fn flops(&self) -> u64 {
        self.shape.needed_flops(self.products())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where as many pairs of queries and keys are counted one by one.
    #[test]
    fn a_window_needs_as_many_scores_as_it_leaves() {
        for window in [None, Some(1), Some(3), Some(10), Some(11), Some(usize::MAX)] {
            let shape = AttentionShape {
                window,
                v_head_dim: 7,
                ..AttentionShape::new([2, 10], [6, 3], 4)
            };
            let seen = |query| query + 1 - shape.first_in_window(query);
            let pairs: usize = (0..10).map(seen).sum();
            let of_window = window.map_or(55, |window| match window {
                1 => 10,
                3 => 27,
                _ => 55,
            });
            assert_eq!(pairs, of_window, "{window:?}");
            // Two operations a multiplication, in each of 12 heads: of 4 in 3 products, of 7 in 2.
            let width = 3 * 4 + 2 * 7;
            assert_eq!(shape.needed_flops([3, 2]), 2 * 12 * width * pairs as u64);
        }
    }
}
