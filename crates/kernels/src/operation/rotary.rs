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

impl Contract for Rotary<'_> {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn check(&self, check: &Check) -> Checked {
        let (x, table) = (self.x.dims(), self.table.dims());
        check.rank("x", &self.x, 2)?;
        check.real_by_rows("x", &self.x, x)?;
        check.rank("table", &self.table, 3)?;
        check.tensor("table", &self.table, &[2, table[1], table[2]], DType::F32)?;
        let head_dim = 2 * table[2];
        check.that(x[1].is_multiple_of(head_dim), || {
            format!("`x` is {x:?}: not whole heads of {head_dim}")
        })?;
        self.positions.check(check, x[0], table[1])
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let &[parts, rows, half] = self.table.dims() else {
            unreachable!("the check asks for three dimensions");
        };
        let rows = parts * self.positions.table_rows(self.x.dims()[0], rows);
        let table = self.table.reshape([parts * self.table.dims()[1], half]);
        let read = [table.rows(0..rows)]
            .into_iter()
            .chain(self.positions.given());
        [changes(&self.x)]
            .into_iter()
            .chain(read.map(reads))
            .collect()
    }
}
