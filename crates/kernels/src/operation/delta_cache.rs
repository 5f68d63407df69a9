//! Layers of the gated delta rule while tokens are generated: a cache has what they need of the tokens before, whose size does not
//! depend on how many these are.

use super::DeltaShape;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use memory::{In, Out};

operation! {
    /// [`super::ShortConvolution`] of the last tokens of each sequence: `out [b * n, c]` of `x [b * n, c]`, `n` rows for each of `b`
    /// sequences. `before [b, taps - 1, c]` has the rows of x in front of these; it becomes those in front of the tokens that follow.
    ///
    /// `lengths [b]` i32 are the sequences' tokens, including the new ones. With `n` tokens a sequence begins here: nothing of its
    /// `before` is read, and zeros are in front. If it has fewer, its rows come last, and those in front of its first token become 0.
    CachedConvolution "cached_convolution": out [t, c], weight [_, taps], lengths [b] {
        out: Out<'a> [t, c],
        before: Out<'a> [b, taps.saturating_sub(1), c] changes,
        x: In<'a> [t, c] by_rows,
        weight: In<'a> [c, taps],
        lengths: In<'a> [b] i32,
    }

    /// [`super::GatedDelta`] of the last `shape.seq` tokens of each sequence, token by token. `states [b, value_heads, key_dim, value_dim]`
    /// (f32) are those in front of these tokens; they become those behind them. `lengths` are as for [`CachedConvolution`]: a sequence that
    /// begins here starts from zero, whatever its states hold.
    ///
    /// The bits of a row of `out` do not depend on the rest of the batch, or on how many tokens are new.
    CachedDelta "cached_delta": mixed {
        out: Out<'a> [..shape.values()],
        states: Out<'a> [shape.batch, shape.value_heads, shape.key_dim, shape.value_dim] f32 changes,
        mixed: In<'a> [..shape.mixed()],
        b: In<'a> [..shape.gates()] by_rows,
        a: In<'a> [..shape.gates()] by_rows,
        a_log: In<'a> [shape.value_heads] f32,
        dt_bias: In<'a> [shape.value_heads] f32,
        lengths: In<'a> [shape.batch] i32,
        shape: DeltaShape,
    }
}

impl Contract for CachedConvolution<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let [rows, sequences] = [self.x, self.lengths].map(|of| of.dims()[0]);
        check.that(sequences > 0 && rows.is_multiple_of(sequences), || {
            format!("{rows} rows are not as many for each of {sequences} sequences")
        })?;
        check.convolution(self.x.dims(), self.weight.dims(), rows / sequences)
    }
}

impl Contract for CachedDelta<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.shape.check(check)
    }

    fn multiplications(&self) -> usize {
        self.shape.multiplications([3, 0])
    }
}
