//! Latent attention (DeepSeek-V2, 2024): heads of queries and keys whose last columns alone are turned by the rotary
//! embedding, and keys and values that come from one latent a token.
//!
//! Shapes: `t` tokens, `a` heads, `n` columns of a head without a position, `p` columns with one, `v` of a value.

use super::Positions;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::{operation, size};
use memory::{In, Out};

operation! {
    /// Rotates the last `p` columns of each head of `x [t, a (n + p)]` in place, as [`super::Rotary`] does the first;
    /// `table [2, positions, p / 2]` (f32) has cosines, then sines. Pairs are (i, i + p / 2), or (2 i, 2 i + 1) if
    /// `are_neighbours`. `inverse` turns the other way.
    RotaryTail "rotary_tail": x [t, w], table [_, p, half] {
        x: Out<'a> [t, w] changes,
        head_dim: usize,
        table: In<'a> [2, p, half] f32 touched(2 * positions.table_rows(t, p)),
        positions: Positions<'a> [t] i32,
        are_neighbours: bool,
        inverse: bool,
    }

    /// Keys and values of all heads: each head of `k [t, a (n + p)]` has its columns of `kv [t, a (n + v)]` without a
    /// position, then `k_rotary [t, p]`, which all heads share; `v [t, a v]` the rest of `kv`. Either may be left out.
    ExpandKeys "expand_keys": kv [t, w], k_rotary [_, p] {
        k: Option<Out<'a>> [t, size(k.as_ref(), 1)],
        v: Option<Out<'a>> [t, size(v.as_ref(), 1)],
        kv: In<'a> [t, w],
        k_rotary: In<'a> [t, p],
        heads: usize,
    }

    /// Gradients of [`ExpandKeys`]: `dkv [t, a (n + v)]` and `dk_rotary [t, p]`, the sum over heads in f32 and in order,
    /// rounded once.
    ExpandKeysBackward "expand_keys_backward": dkv [t, w], dk_rotary [_, p], dk [_, k], dv [_, v] {
        dkv: Out<'a> [t, w],
        dk_rotary: Out<'a> [t, p],
        dk: In<'a> [t, k],
        dv: In<'a> [t, v],
        heads: usize,
    }
}

impl Contract for RotaryTail<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let x = self.x.dims();
        self.positions.check(check, x[0], self.table.dims()[1])?;
        check.turned_heads(&x[1..], self.head_dim, self.table)
    }
}

/// Checks the columns of keys, values, and what they are made of against each other.
fn check_heads(
    check: &Check,
    heads: usize,
    [kv, turned]: [usize; 2],
    [k, v]: [Option<usize>; 2],
) -> Checked {
    check.that(turned > 0, || "`k_rotary` has no columns".into())?;
    check.that(heads > 0 && kv.is_multiple_of(heads), || {
        format!("`kv` has {kv} columns: not whole heads of {heads}")
    })?;
    let both = kv / heads;
    let parts = [
        k.map(|k| ("k", k, (k / heads).saturating_sub(turned))),
        v.map(|v| ("v", v, both.saturating_sub(v / heads))),
    ];
    let mut unturned = None;
    for (name, columns, own) in parts.into_iter().flatten() {
        let is_whole = columns.is_multiple_of(heads) && (1..both).contains(&own);
        check.that(is_whole, || {
            format!("`{name}` has {columns} columns: not {heads} heads made of `kv`")
        })?;
        check.that(*unturned.get_or_insert(own) == own, || {
            format!("`k` and `v` do not add up to `kv`, which has {kv} columns")
        })?;
    }
    check.that(unturned.is_some(), || {
        "neither `k` nor `v` is asked for".into()
    })
}

impl Contract for ExpandKeys<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let columns = [&self.k, &self.v].map(|part| part.as_ref().map(|part| part.dims()[1]));
        let made_of = [self.kv, self.k_rotary].map(|x| x.dims()[1]);
        check_heads(check, self.heads, made_of, columns)
    }
}

impl Contract for ExpandKeysBackward<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let columns = [self.dk, self.dv].map(|part| Some(part.dims()[1]));
        let made_of = [&self.dkv, &self.dk_rotary].map(|x| x.dims()[1]);
        check_heads(check, self.heads, made_of, columns)
    }
}
