//! Rotary positions (Su et al. 2021).

use super::Positions;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use memory::{In, Out};

operation! {
    /// Rotates pairs (i, i + head_dim / 2) of every head of `x [t, heads * head_dim]`, in place, by the angles of its token's
    /// position. There may be gaps between the rows of `x`. `table` is `[2, p, head_dim / 2]` f32: cosines, sines. `inverse`
    /// turns the other way: the backward pass.
    Rotary "rotary": x [t, w], table [_, p, half] {
        x: Out<'a> [t, w] real by_rows changes,
        table: In<'a> [2, p, half] f32 touched(2 * positions.table_rows(t, p)),
        positions: Positions<'a> [t] i32,
        inverse: bool,
    }
}

impl Contract for Rotary<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let x = self.x.dims();
        self.positions.check(check, x[0], self.table.dims()[1])?;
        let head_dim = 2 * self.table.dims()[2];
        check.that(x[1].is_multiple_of(head_dim), || {
            format!("`x` is {x:?}: not whole heads of {head_dim}")
        })
    }
}
