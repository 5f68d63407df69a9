//! Latent attention (DeepSeek-V2, 2024): heads of queries and keys whose last columns alone are turned by the rotary
//! embedding, and keys and values that come from one latent a token.
//!
//! Shapes: `t` tokens, `a` heads, `n` columns of a head without a position, `p` columns with one, `v` of a value.

use super::Positions;
use super::check::{Check, Checked};
use super::contract::{Contract, Operand, changes, reads, writes};
use super::rotary::{check_table, read_of_table};
use memory::{In, Out};

/// Rotates the last `p` columns of each head of `x [t, a (n + p)]` in place, as [`super::Rotary`] does with all;
/// `table [2, positions, p / 2]` (f32) has cosines, then sines. Pairs are (i, i + p / 2), or (2 i, 2 i + 1) if
/// `are_neighbours`. `inverse` turns the other way.
pub struct RotaryTail<'a> {
    pub x: Out<'a>,
    pub head_dim: usize,
    pub table: In<'a>,
    pub positions: Positions<'a>,
    pub are_neighbours: bool,
    pub inverse: bool,
}

/// Keys and values of all heads: each head of `k [t, a (n + p)]` has its columns of `kv [t, a (n + v)]` without a
/// position, then `k_rotary [t, p]`, which all heads share; `v [t, a v]` the rest of `kv`. Either may be left out.
pub struct ExpandKeys<'a> {
    pub k: Option<Out<'a>>,
    pub v: Option<Out<'a>>,
    pub kv: In<'a>,
    pub k_rotary: In<'a>,
    pub heads: usize,
}

/// Gradients of [`ExpandKeys`]: `dkv [t, a (n + v)]` and `dk_rotary [t, p]`, the sum over heads in f32 and in order,
/// rounded once.
pub struct ExpandKeysBackward<'a> {
    pub dkv: Out<'a>,
    pub dk_rotary: Out<'a>,
    pub dk: In<'a>,
    pub dv: In<'a>,
    pub heads: usize,
}

impl Contract for RotaryTail<'_> {
    fn name(&self) -> &'static str {
        "rotary_tail"
    }

    fn check(&self, check: &Check) -> Checked {
        let x = self.x.dims();
        check.real_of_rank("x", &self.x, 2)?;
        check_table(check, &self.table, &self.positions, x[0])?;
        let (head_dim, turned) = (self.head_dim, 2 * self.table.dims()[2]);
        check.that(head_dim > 0 && x[1].is_multiple_of(head_dim), || {
            format!("`x` is {x:?}: not whole heads of {head_dim}")
        })?;
        check.that((1..=head_dim).contains(&turned), || {
            format!("a head has {head_dim} columns, and {turned} are to be turned")
        })
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let read = read_of_table(self.table, &self.positions, self.x.dims()[0]);
        [changes(&self.x)].into_iter().chain(read).collect()
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
    check.real_of_rank("kv", &kv, 2)?;
    check.rank("k_rotary", &k_rotary, 2)?;
    let (tokens, turned) = (kv.dims()[0], k_rotary.dims()[1]);
    check.tensor("k_rotary", &k_rotary, &[tokens, turned], kv.dtype())?;
    check.that(turned > 0, || "`k_rotary` has no columns".into())?;
    check.that(heads > 0 && kv.dims()[1].is_multiple_of(heads), || {
        format!("`kv` is {:?}: not whole heads of {heads}", kv.dims())
    })?;
    let both = kv.dims()[1] / heads;
    let mut unturned = None;
    for (name, part, rotary) in [("k", k, turned), ("v", v, 0)] {
        let Some(part) = part else { continue };
        check.rank(name, &part, 2)?;
        let width = part.dims()[1];
        check.tensor(name, &part, &[tokens, width], kv.dtype())?;
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
    fn name(&self) -> &'static str {
        "expand_keys"
    }

    fn check(&self, check: &Check) -> Checked {
        let [k, v] = [&self.k, &self.v].map(|part| part.as_ref().map(Out::as_in));
        check_heads(check, self.heads, (self.kv, self.k_rotary), k, v)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let written = [&self.k, &self.v].into_iter().flatten().map(writes);
        [reads(self.kv), reads(self.k_rotary)]
            .into_iter()
            .chain(written)
            .collect()
    }
}

impl Contract for ExpandKeysBackward<'_> {
    fn name(&self) -> &'static str {
        "expand_keys_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        let made = (self.dkv.as_in(), self.dk_rotary.as_in());
        check_heads(check, self.heads, made, Some(self.dk), Some(self.dv))
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![
            writes(&self.dkv),
            writes(&self.dk_rotary),
            reads(self.dk),
            reads(self.dv),
        ]
    }
}
