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
    /// Rotates the last `p` columns of each head of `x [t, a (n + p)]` in place, as [`super::Rotary`] does with all;
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
        let (head_dim, turned) = (self.head_dim, 2 * self.table.dims()[2]);
        check.that(head_dim > 0 && x[1].is_multiple_of(head_dim), || {
            format!("`x` is {x:?}: not whole heads of {head_dim}")
        })?;
        check.that((1..=head_dim).contains(&turned), || {
            format!("a head has {head_dim} columns, and {turned} are to be turned")
        })
    }
}

/// Checks keys, values and what they are made of against each other.
fn check_heads(
    check: &Check,
    heads: usize,
    (kv, k_rotary): (In, In),
    k: Option<In>,
    v: Option<In>,
) -> Checked {
    let turned = k_rotary.dims()[1];
    check.that(turned > 0, || "`k_rotary` has no columns".into())?;
    check.that(heads > 0 && kv.dims()[1].is_multiple_of(heads), || {
        format!("`kv` is {:?}: not whole heads of {heads}", kv.dims())
    })?;
    let both = kv.dims()[1] / heads;
    let mut unturned = None;
    for (name, part, rotary) in [("k", k, turned), ("v", v, 0)] {
        let Some(part) = part else { continue };
        let width = part.dims()[1];
        let head = width / heads;
        check.that(
            width.is_multiple_of(heads) && head > rotary && head - rotary < both,
            || {
                format!(
                    "`{name}` is {:?}: not {heads} heads made of `kv`",
                    part.dims()
                )
            },
        )?;
        let own = if name == "k" {
            head - rotary
        } else {
            both - head
        };
        check.that(unturned.is_none_or(|other| other == own), || {
            format!("`k` and `v` do not add up to `kv`, {:?}", kv.dims())
        })?;
        unturned = Some(own);
    }
    check.that(unturned.is_some(), || {
        "neither `k` nor `v` is asked for".into()
    })
}

impl Contract for ExpandKeys<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let [k, v] = [&self.k, &self.v].map(|part| part.as_ref().map(Out::as_in));
        check_heads(check, self.heads, (self.kv, self.k_rotary), k, v)
    }
}

impl Contract for ExpandKeysBackward<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let made = (self.dkv.as_in(), self.dk_rotary.as_in());
        check_heads(check, self.heads, made, Some(self.dk), Some(self.dv))
    }
}
