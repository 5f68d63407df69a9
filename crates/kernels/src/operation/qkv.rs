//! Splits the product for queries, keys and values for attention, and joins their gradients.

use super::Positions;
use super::check::{Check, Checked};
use super::contract::{Contract, Operand, reads, writes};
use super::rotary::{check_table, read_of_table};
use memory::{In, Out};

/// The rotation of queries and keys when they are split or joined, as by [`super::Rotary`].
#[derive(Clone, Copy)]
pub struct Turn<'a> {
    /// `[2, p, head_dim / 2]` f32: cosines, sines.
    pub table: In<'a>,
    /// The positions of the tokens.
    pub positions: Positions<'a>,
}

/// Splits rows of `qkv [t, q + k + v]` into `q [t, q]`, `k [t, k]` and `v [t, v]`, and rotates the first two. Each of
/// the three may be left out.
pub struct SplitQkv<'a> {
    pub q: Option<Out<'a>>,
    pub k: Option<Out<'a>>,
    pub v: Option<Out<'a>>,
    pub qkv: In<'a>,
    /// Columns of `k`, and of `v`.
    pub kv_widths: [usize; 2],
    pub turn: Option<Turn<'a>>,
}

/// The inverse, for gradients: joins rows of `q [t, q]` and `k [t, k]`, rotated back, and of `v [t, v]` into rows of
/// `qkv [t, q + k + v]`.
pub struct JoinQkv<'a> {
    pub qkv: Out<'a>,
    pub q: In<'a>,
    pub k: In<'a>,
    pub v: In<'a>,
    pub turn: Option<Turn<'a>>,
}

impl<'a> Turn<'a> {
    /// Refuses a rotation that does not fit `tokens` tokens and rows of these widths.
    fn check(&self, check: &Check, tokens: usize, widths: [usize; 2]) -> Checked {
        check_table(check, &self.table, &self.positions, tokens)?;
        let head_dim = 2 * self.table.dims()[2];
        let whole = |width: &usize| width.is_multiple_of(head_dim);
        check.that(widths.iter().all(whole), || {
            format!("queries and keys of {widths:?} columns are not whole heads of {head_dim}")
        })
    }

    /// The parts of table and positions that are read.
    fn operands(&self, tokens: usize) -> impl Iterator<Item = Operand<'a>> {
        read_of_table(self.table, &self.positions, tokens)
    }
}

impl Contract for SplitQkv<'_> {
    fn name(&self) -> &'static str {
        "split_qkv"
    }

    fn check(&self, check: &Check) -> Checked {
        let SplitQkv {
            q,
            k,
            v,
            qkv,
            kv_widths,
            turn,
        } = self;
        check.real_of_rank("qkv", qkv, 2)?;
        let &[tokens, width] = qkv.dims() else {
            unreachable!("the rank was checked");
        };
        let [k_width, v_width] = *kv_widths;
        check.that(k_width + v_width < width, || {
            format!("keys and values of {kv_widths:?} columns leave none of {width} to queries")
        })?;
        let q_width = width - k_width - v_width;
        for (name, part, width) in [("q", q, q_width), ("k", k, k_width), ("v", v, v_width)] {
            check.optional(name, part, &[tokens, width], qkv.dtype())?;
        }
        turn.iter()
            .try_for_each(|turn| turn.check(check, tokens, [q_width, k_width]))
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let parts = [&self.q, &self.k, &self.v].into_iter().flatten();
        let read = [self.qkv].into_iter().map(reads);
        let turn = self.turn.iter();
        read.chain(parts.map(writes))
            .chain(turn.flat_map(|turn| turn.operands(self.qkv.dims()[0])))
            .collect()
    }
}

impl Contract for JoinQkv<'_> {
    fn name(&self) -> &'static str {
        "join_qkv"
    }

    fn check(&self, check: &Check) -> Checked {
        let JoinQkv { qkv, q, k, v, turn } = self;
        check.real_of_rank("q", q, 2)?;
        let (tokens, mut width) = (q.dims()[0], q.dims()[1]);
        for (name, part) in [("k", k), ("v", v)] {
            check.rank(name, part, 2)?;
            check.tensor(name, part, &[tokens, part.dims()[1]], q.dtype())?;
            width += part.dims()[1];
        }
        check.tensor("qkv", qkv, &[tokens, width], q.dtype())?;
        turn.iter()
            .try_for_each(|turn| turn.check(check, tokens, [q.dims()[1], k.dims()[1]]))
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let turn = self.turn.iter();
        [writes(&self.qkv)]
            .into_iter()
            .chain([self.q, self.k, self.v].map(reads))
            .chain(turn.flat_map(|turn| turn.operands(self.q.dims()[0])))
            .collect()
    }
}
