//! Rotary positions (Su et al. 2021).

use super::check::{Check, Checked};
use super::contract::{Contract, Operand, changes, reads};
use memory::{DType, In, Out};

/// Rotates pairs (i, i + head_dim / 2) of every head of `x [b * s, heads * head_dim]`, in place. `table` is
/// `[2, s, head_dim / 2]` f32: cosines, sines. `inverse` turns the other way: the backward pass.
pub struct Rotary<'a> {
    pub x: Out<'a>,
    pub table: In<'a>,
    pub inverse: bool,
}

impl Contract for Rotary<'_> {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn check(&self, check: &Check) -> Checked {
        let (x, table) = (self.x.dims(), self.table.dims());
        check.real_of_rank("x", &self.x, 2)?;
        check.rank("table", &self.table, 3)?;
        check.tensor("table", &self.table, &[2, table[1], table[2]], DType::F32)?;
        let (seq, head_dim) = (table[1], 2 * table[2]);
        let whole = x[0].is_multiple_of(seq) && x[1].is_multiple_of(head_dim);
        check.that(whole, || {
            format!("`x` is {x:?}: not whole sequences of {seq} and heads of {head_dim}")
        })
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![changes(&self.x), reads(self.table)]
    }
}
