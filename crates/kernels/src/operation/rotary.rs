//! Rotary positions (Su et al. 2021).

use super::Positions;
use super::check::{Check, Checked};
use super::contract::{Contract, Operand, changes, reads};
use memory::{DType, In, Out};

/// Rotates pairs (i, i + head_dim / 2) of every head of `x [t, heads * head_dim]`, in place, by the angles of its token's
/// position. There may be gaps between the rows of `x`. `table` is `[2, p, head_dim / 2]` f32: cosines, sines. `inverse`
/// turns the other way: the backward pass.
pub struct Rotary<'a> {
    pub x: Out<'a>,
    pub table: In<'a>,
    pub positions: Positions<'a>,
    pub inverse: bool,
}

/// Refuses a table of angles that does not fit `tokens` tokens at their positions.
pub(super) fn check_table(
    check: &Check,
    table: &In,
    positions: &Positions,
    tokens: usize,
) -> Checked {
    check.rank("table", table, 3)?;
    let dims = table.dims();
    check.tensor("table", table, &[2, dims[1], dims[2]], DType::F32)?;
    positions.check(check, tokens, dims[1])
}

/// The parts of table and positions that `tokens` tokens read.
pub(super) fn read_of_table<'a>(
    table: In<'a>,
    positions: &Positions<'a>,
    tokens: usize,
) -> impl Iterator<Item = Operand<'a>> {
    let &[parts, rows, half] = table.dims() else {
        unreachable!("the check asks for three dimensions");
    };
    let touched = parts * positions.table_rows(tokens, rows);
    let table = table.reshape([parts * rows, half]).rows(0..touched);
    [table].into_iter().chain(positions.given()).map(reads)
}

impl Contract for Rotary<'_> {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn check(&self, check: &Check) -> Checked {
        let x = self.x.dims();
        check.rank("x", &self.x, 2)?;
        check.real_by_rows("x", &self.x, x)?;
        check_table(check, &self.table, &self.positions, x[0])?;
        let head_dim = 2 * self.table.dims()[2];
        check.that(x[1].is_multiple_of(head_dim), || {
            format!("`x` is {x:?}: not whole heads of {head_dim}")
        })
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let read = read_of_table(self.table, &self.positions, self.x.dims()[0]);
        [changes(&self.x)].into_iter().chain(read).collect()
    }
}
