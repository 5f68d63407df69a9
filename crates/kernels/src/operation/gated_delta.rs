//! Layers of the gated delta rule (Yang et al. 2025), as Qwen3-Next and Qwen3.5 have them: a short causal convolution, the rule, and a gated
//! norm.

use super::Init;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use memory::{In, Out};
use std::ops::Range;

/// Tokens of a chunk.
pub const DELTA_CHUNK: usize = 64;

/// The most taps of a convolution.
pub(crate) const TAPS_MAX: usize = 8;

/// The widest keys: those for whose chunks multiprocessors have room in shared memory.
const KEY_DIM_MAX: usize = 128;

/// The shape of a layer of the gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens in each.
    pub seq: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, each with a state of its own; neighbours share a key head. A multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a head of queries, and of one of keys: at most 128.
    pub key_dim: usize,
    /// Width of a head of values.
    pub value_dim: usize,
    /// Chunks from one kept state to the next; the first chunk's state is always kept. 1 keeps all.
    pub state_interval: usize,
}

impl DeltaShape {
    /// The most tokens that the convolution in front sees.
    pub const TAPS_MAX: usize = TAPS_MAX;
    /// The widest heads of keys.
    pub const KEY_DIM_MAX: usize = KEY_DIM_MAX;

    /// Value heads of a key head.
    pub fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// `[b * s, c]`: in each row queries, keys, then values.
    pub fn mixed(&self) -> [usize; 2] {
        let (keys, values) = (
            self.key_heads * self.key_dim,
            self.value_heads * self.value_dim,
        );
        [self.batch * self.seq, 2 * keys + values]
    }

    /// `[b * s, value_heads * value_dim]`.
    pub fn values(&self) -> [usize; 2] {
        [self.batch * self.seq, self.value_heads * self.value_dim]
    }

    /// `[b * s, value_heads]`.
    pub fn gates(&self) -> [usize; 2] {
        [self.batch * self.seq, self.value_heads]
    }

    /// Chunks of a sequence. They lie on a fixed grid, whatever documents are in it.
    pub fn chunks(&self) -> usize {
        self.seq.div_ceil(DELTA_CHUNK)
    }

    /// States of a sequence's head that are kept.
    pub fn kept_states(&self) -> usize {
        self.chunks().div_ceil(self.state_interval)
    }

    /// Whether no state has to be made again.
    pub fn keeps_all_states(&self) -> bool {
        self.kept_states() == self.chunks()
    }

    /// `[b * kept states, value_heads, key_dim, value_dim]`.
    pub fn states(&self) -> [usize; 4] {
        [
            self.batch * self.kept_states(),
            self.value_heads,
            self.key_dim,
            self.value_dim,
        ]
    }

    /// The numbers of the chunks of a sequence between states that are kept.
    pub(crate) fn segments(&self) -> impl DoubleEndedIterator<Item = Range<usize>> + use<> {
        let (chunks, interval) = (self.chunks(), self.state_interval);
        let firsts = (0..self.kept_states()).map(move |kept| kept * interval);
        firsts.map(move |first| first..chunks.min(first + interval))
    }

    pub(super) fn check(&self, check: &Check) -> Checked {
        let DeltaShape {
            key_heads,
            value_heads,
            ..
        } = *self;
        let sizes = [
            self.batch,
            self.seq,
            key_heads,
            value_heads,
            self.key_dim,
            self.value_dim,
            self.state_interval,
        ];
        check.that(sizes.iter().all(|size| *size > 0), || {
            format!("{self:?} has a size of 0")
        })?;
        check.that(value_heads.is_multiple_of(key_heads), || {
            format!("{value_heads} value heads do not share {key_heads} key heads evenly")
        })?;
        check.that(self.key_dim <= KEY_DIM_MAX, || {
            format!(
                "keys have at most {KEY_DIM_MAX} columns a head, not {}",
                self.key_dim
            )
        })
    }

    /// Multiplications of the chunks' products for each token and value head: those with the state, and those within a chunk.
    pub(super) fn multiplications(&self, [with_state, in_chunk]: [usize; 2]) -> usize {
        let (keys, values) = (self.key_dim, self.value_dim);
        let of_token = with_state * keys * values + in_chunk * DELTA_CHUNK * (keys + values) / 2;
        self.batch * self.seq * self.value_heads * of_token
    }
}

operation! {
    /// `out [t, c] = silu(u)`, `u_t` = the sum of `weight [c, taps]` times the last `taps` tokens of each column, the last tap the token
    /// itself. Nothing comes from other sequences of `seq` tokens, or other documents (as in [`super::FlashOptions`]). There may be
    /// gaps between the rows of `x`, and there are at most 8 taps.
    ShortConvolution "short_convolution": out [t, c], weight [_, taps] {
        out: Out<'a> [t, c],
        x: In<'a> [t, c] by_rows,
        weight: In<'a> [c, taps],
        seq: usize,
        documents: Option<In<'a>> [t.checked_div(*seq).unwrap_or(0), *seq] i32 uncounted,
    }

    /// Gradients of [`ShortConvolution`]: `dx [t, c]`, which is overwritten and may have gaps between rows, and `dweight = init + ...`, a
    /// gradient: f32 or bf16, summed in f32 and rounded once.
    ShortConvolutionBackward "short_convolution_backward": dout [t, c], weight [_, taps] {
        dx: Out<'a> [t, c] by_rows,
        dweight: Out<'a> [c, taps] real plus(init),
        init: Init<'a> [] in_place,
        dout: In<'a> [t, c],
        x: In<'a> [t, c] by_rows,
        weight: In<'a> [c, taps],
        seq: usize,
        documents: Option<In<'a>> [t.checked_div(*seq).unwrap_or(0), *seq] i32 uncounted,
    }

    /// The gated delta rule in chunks of [`DELTA_CHUNK`] tokens. Of `mixed` ([`DeltaShape::mixed`]) queries and keys are normed by
    /// `x / sqrt(sum(x^2) + 1e-6)`, queries also divided by `sqrt(key_dim)`. With `beta = sigmoid(b)` and `g = -e^a_log softplus(a + dt_bias)`
    /// of each value head, a token changes the head's state S `[key_dim, value_dim]`, zero in front of a document:
    /// `S = e^g S; S += k (beta (v - S^T k))^T; out = S^T q`. All of it is f32; in bf16 `beta` and `out` are rounded. `states`
    /// ([`DeltaShape::states`], f32) are those in front of chunks, every [`DeltaShape::state_interval`]-th of a sequence. Either output may be
    /// left out. `scratch` is f32 of [`GatedDelta::scratch_elements`].
    GatedDelta "gated_delta": mixed {
        out: Option<Out<'a>> [..shape.values()],
        states: Option<Out<'a>> [..shape.states()] f32,
        scratch: Out<'a> [scratch.elements()] f32 uncounted,
        mixed: In<'a> [..shape.mixed()],
        b: In<'a> [..shape.gates()] by_rows,
        a: In<'a> [..shape.gates()] by_rows,
        a_log: In<'a> [shape.value_heads] f32,
        dt_bias: In<'a> [shape.value_heads] f32,
        shape: DeltaShape,
        documents: Option<In<'a>> [shape.batch, shape.seq] i32 uncounted,
    }

    /// Gradients of [`GatedDelta`] from `dout` and the `states` of the same inputs; those that were not kept are made again, with the bits that
    /// they had. `dmixed`, `db` and `da` are overwritten; `da_log` and `ddt_bias [value_heads]` are gradients: f32 or bf16, rounded once.
    /// `scratch` is f32 of [`GatedDeltaBackward::scratch_elements`].
    GatedDeltaBackward "gated_delta_backward": mixed {
        dmixed: Out<'a> [..shape.mixed()],
        db: Out<'a> [..shape.gates()] by_rows,
        da: Out<'a> [..shape.gates()] by_rows,
        da_log: Out<'a> [shape.value_heads] real plus(da_log_init),
        da_log_init: Init<'a> [] in_place,
        ddt_bias: Out<'a> [shape.value_heads] real plus(ddt_bias_init),
        ddt_bias_init: Init<'a> [] in_place,
        scratch: Out<'a> [scratch.elements()] f32 uncounted,
        dout: In<'a> [..shape.values()],
        states: In<'a> [..shape.states()] f32,
        mixed: In<'a> [..shape.mixed()],
        b: In<'a> [..shape.gates()] by_rows,
        a: In<'a> [..shape.gates()] by_rows,
        a_log: In<'a> [shape.value_heads] f32,
        dt_bias: In<'a> [shape.value_heads] f32,
        shape: DeltaShape,
        documents: Option<In<'a>> [shape.batch, shape.seq] i32 uncounted,
    }

    /// `y [t, w] = x rstd weight silu(z)`, head by head of `weight [h]`: `rstd [t, w / h] (f32) = 1 / sqrt(mean(x^2) + eps)`. Either output
    /// may be left out. In bf16 `x rstd` is rounded before the weight. There may be gaps between the rows of `z`.
    GatedNorm "gated_norm": x [t, w], weight [h] {
        y: Option<Out<'a>> [t, w],
        rstd: Option<Out<'a>> [t, w.checked_div(h).unwrap_or(0)] f32,
        x: In<'a> [t, w],
        z: In<'a> [t, w] by_rows,
        weight: In<'a> [h],
        eps: f32,
    }

    /// Gradients of [`GatedNorm`]: `dx` and `dz`, which are overwritten, and `dweight [h] = init + ...`, f32 or bf16.
    GatedNormBackward "gated_norm_backward": x [t, w], weight [h] {
        dx: Out<'a> [t, w],
        dz: Out<'a> [t, w] by_rows,
        dweight: Out<'a> [h] real plus(init),
        init: Init<'a> [] in_place,
        dy: In<'a> [t, w],
        x: In<'a> [t, w],
        z: In<'a> [t, w] by_rows,
        weight: In<'a> [h],
        rstd: In<'a> [t, w.checked_div(h).unwrap_or(0)] f32,
    }
}

impl Check {
    /// Refuses rows that are not whole sequences of `seq` tokens.
    fn whole_sequences(&self, tokens: usize, seq: usize) -> Checked {
        self.that(seq > 0 && tokens.is_multiple_of(seq), || {
            format!("{tokens} rows are not whole sequences of {seq}")
        })
    }

    pub(super) fn convolution(&self, rows: &[usize], weight: &[usize], seq: usize) -> Checked {
        self.whole_sequences(rows[0], seq)?;
        let taps = weight[1];
        self.that((1..=TAPS_MAX).contains(&taps), || {
            format!("a convolution has 1 to {TAPS_MAX} taps, not {taps}")
        })
    }

    fn whole_heads(&self, width: usize, head: usize) -> Checked {
        self.that(head > 0 && width.is_multiple_of(head), || {
            format!("rows of {width} columns are not whole heads of {head}")
        })
    }
}

impl Contract for ShortConvolution<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.convolution(self.out.dims(), self.weight.dims(), self.seq)
    }
}

impl Contract for ShortConvolutionBackward<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.convolution(self.dout.dims(), self.weight.dims(), self.seq)
    }
}

impl Contract for GatedDelta<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.shape.check(check)
    }

    fn multiplications(&self) -> usize {
        self.shape.multiplications([3, 3])
    }
}

impl Contract for GatedDeltaBackward<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.shape.check(check)
    }

    fn multiplications(&self) -> usize {
        let again = match self.shape.keeps_all_states() {
            true => 0,
            false => 2,
        };
        self.shape.multiplications([8 + again, 8 + again])
    }
}

impl Contract for GatedNorm<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        check.positive("eps", self.eps)
    }

    fn conditions(&self, check: &Check) -> Checked {
        check.whole_heads(self.x.dims()[1], self.weight.dims()[0])
    }
}

impl Contract for GatedNormBackward<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.whole_heads(self.x.dims()[1], self.weight.dims()[0])
    }
}
