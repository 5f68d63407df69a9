//! Splits the product for queries, keys and values for attention, and joins their gradients.

use super::Positions;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::{Field, Visit, operation, sizes};
use super::operand::OperandRule;
use memory::{In, Out};

/// The rotation of queries and keys when they are split or joined, as by [`super::Rotary`].
#[derive(Clone, Copy)]
pub struct Turn<'a> {
    /// Columns of a head. The first 2 half are turned, the others copied.
    pub head_dim: usize,
    /// `[2, p, half]` f32: cosines, sines.
    pub table: In<'a>,
    /// The table of queries, of the same shape, where they are turned by another than keys.
    pub q_table: Option<In<'a>>,
    /// The positions of the tokens.
    pub positions: Positions<'a>,
}

operation! {
    /// Splits rows of `qkv [t, q + k + v]` into `q [t, q]`, `k [t, k]` and `v [t, v]`, and rotates the first two. Each of
    /// the three may be left out.
    SplitQkv "split_qkv": qkv [t, w] {
        q: Option<Out<'a>> [t, w.saturating_sub(kv_widths[0] + kv_widths[1])],
        k: Option<Out<'a>> [t, kv_widths[0]],
        v: Option<Out<'a>> [t, kv_widths[1]],
        qkv: In<'a> [t, w],
        /// Columns of `k`, and of `v`.
        kv_widths: [usize; 2],
        turn: Option<Turn<'a>> [t] i32,
    }

    /// The inverse, for gradients: joins rows of `q [t, q]` and `k [t, k]`, rotated back, and of `v [t, v]` into rows of
    /// `qkv [t, q + k + v]`. `largest [1]` (f32): if it is given, the largest magnitude of `qkv`, as [`super::AbsMax`] finds it.
    JoinQkv "join_qkv": qkv, q [t, q_width], k [_, k_width], v [_, v_width] {
        qkv: Out<'a> [t, q_width + k_width + v_width],
        q: In<'a> [t, q_width],
        k: In<'a> [t, k_width],
        v: In<'a> [t, v_width],
        turn: Option<Turn<'a>> [t] i32,
        largest: Option<Out<'a>> [1] f32,
    }
}

impl<'a> Turn<'a> {
    /// Refuses a rotation that does not fit `tokens` tokens and rows of these widths.
    fn check(&self, check: &Check, tokens: usize, widths: [usize; 2]) -> Checked {
        self.positions.check(check, tokens, self.table.dims()[1])?;
        check.turned_heads(&widths, self.head_dim, self.table)
    }

    /// That of queries, with their table.
    pub(crate) fn of_queries(self) -> Turn<'a> {
        let table = self.q_table.unwrap_or(self.table);
        Turn { table, ..self }
    }
}

impl Field for Turn<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        let tokens = rule.dims()[0];
        let [_, rows, half] = sizes(rule.operation, "table", self.table.dims())?;
        let touched = 2 * self.positions.table_rows(tokens, rows);
        let table = rule.shaped([2, rows, half]).f32().touched(touched);
        self.table.visit(table.named("table"), &mut *visit)?;
        self.q_table.visit(table.named("q_table"), &mut *visit)?;
        self.positions.visit(rule, visit)
    }
}

impl Contract for SplitQkv<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let [tokens, width] = [self.qkv.dims()[0], self.qkv.dims()[1]];
        let [k_width, v_width] = self.kv_widths;
        check.that(k_width + v_width < width, || {
            let kv_widths = self.kv_widths;
            format!("keys and values of {kv_widths:?} columns leave none of {width} to queries")
        })?;
        let q_width = width - k_width - v_width;
        self.turn
            .iter()
            .try_for_each(|turn| turn.check(check, tokens, [q_width, k_width]))
    }
}

impl Contract for JoinQkv<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let &[tokens, q_width] = self.q.dims() else {
            unreachable!("the rank was checked");
        };
        self.turn
            .iter()
            .try_for_each(|turn| turn.check(check, tokens, [q_width, self.k.dims()[1]]))
    }
}
