//! Rotary positions (Su et al. 2021).

use super::Positions;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use memory::{In, Out};

operation! {
    /// Rotates pairs (i, i + half) of every head of `x [t, heads * head_dim]`, in place, by the angles of its token's
    /// position; columns of a head beyond the first 2 half stay. There may be gaps between the rows of `x`. `table` is
    /// `[2, p, half]` f32: cosines, sines. `inverse` turns the other way: the backward pass.
    Rotary "rotary": x [t, w], table [_, p, half] {
        x: Out<'a> [t, w] real by_rows changes,
        head_dim: usize,
        table: In<'a> [2, p, half] f32 touched(2 * positions.table_rows(t, p)),
        positions: Positions<'a> [t] i32,
        inverse: bool,
    }
}

impl Contract for Rotary<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let x = self.x.dims();
        self.positions.check(check, x[0], self.table.dims()[1])?;
        check.turned_heads(&x[1..], self.head_dim, self.table)
    }
}

impl Check {
    /// Refuses rows of these widths that are not whole heads, and a table that turns no columns of a head, or more than it has.
    pub(super) fn turned_heads(&self, widths: &[usize], head_dim: usize, table: In) -> Checked {
        let is_whole = |width: &usize| head_dim > 0 && width.is_multiple_of(head_dim);
        self.that(widths.iter().all(is_whole), || {
            format!("rows of {widths:?} columns are not whole heads of {head_dim}")
        })?;
        let turned = 2 * table.dims()[2];
        self.that((1..=head_dim).contains(&turned), || {
            format!("a head has {head_dim} columns, and {turned} are to be turned")
        })
    }
}
