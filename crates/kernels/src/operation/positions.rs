//! Learned positions: a row of a table for each place in a sequence.

use super::Init;
use super::check::{Check, Checked};
use super::contract::{Contract, Operand, changes, reads, writes};
use memory::{In, Out};

/// `x [b * s, h] += table [p, h]`, row by row: a token in place `i` of its sequence, of `seq` tokens, gets row `i`. `p` is
/// at least `seq`.
pub struct AddPositions<'a> {
    pub x: Out<'a>,
    pub table: In<'a>,
    pub seq: usize,
}

/// `dtable [p, h] = init + ` the rows of `dx [b * s, h]`, each added to that of its place, sequence after sequence. A
/// gradient: f32 or bf16, summed in f32 and rounded once. Rows from `seq` on are replaced by zeros, or stay.
pub struct AddPositionsBackward<'a> {
    pub dtable: Out<'a>,
    pub dx: In<'a>,
    pub seq: usize,
    pub init: Init<'a>,
}

impl Contract for AddPositions<'_> {
    fn name(&self) -> &'static str {
        "add_positions"
    }

    fn check(&self, check: &Check) -> Checked {
        let (x, table) = (&self.x, &self.table);
        check.real_of_rank("x", x, 2)?;
        check.rank("table", table, 2)?;
        let (rows, positions) = (x.dims()[0], table.dims()[0]);
        check.tensor("table", table, &[positions, x.dims()[1]], x.dtype())?;
        whole_sequences(check, rows, self.seq, positions)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![changes(&self.x), reads(self.table.rows(0..self.seq))]
    }
}

impl Contract for AddPositionsBackward<'_> {
    fn name(&self) -> &'static str {
        "add_positions_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        let (dtable, dx) = (&self.dtable, &self.dx);
        check.no_residual(&self.init)?;
        check.real_of_rank("dx", dx, 2)?;
        check.rank("dtable", dtable, 2)?;
        let (rows, positions) = (dx.dims()[0], dtable.dims()[0]);
        check.real("dtable", dtable, &[positions, dx.dims()[1]])?;
        whole_sequences(check, rows, self.seq, positions)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let dtable = match self.init {
            Init::Overwrite => writes(&self.dtable),
            Init::Accumulate | Init::Add(_) => Operand {
                view: self.dtable.as_in().rows(0..self.seq),
                crossings: 2,
            },
        };
        vec![reads(self.dx), dtable]
    }
}

fn whole_sequences(check: &Check, rows: usize, seq: usize, positions: usize) -> Checked {
    check.that(seq > 0 && rows.is_multiple_of(seq), || {
        format!("{rows} rows are not whole sequences of {seq}")
    })?;
    check.that(seq <= positions, || {
        format!("sequences of {seq} are longer than a table of {positions} positions")
    })
}

#[cfg(test)]
mod tests {
    use crate::{AddPositionsBackward, Init, Operation};
    use memory::{Category, DType, Memory};

    #[test]
    fn sums_touch_as_many_rows_as_a_sequence_has_tokens() {
        let memory = Memory::shapes();
        let lease = |rows| memory.lease(Category::Temporary, "x", [rows, 3], DType::F32);
        let (dx, mut dtable) = (lease(10).unwrap(), lease(7).unwrap());
        let mut rows = |init| {
            let operation = AddPositionsBackward {
                dtable: dtable.view_mut(),
                dx: dx.view(),
                seq: 5,
                init,
            };
            Operation::from(operation).cost().bytes / (3 * 4)
        };
        assert_eq!(rows(Init::Overwrite), 10 + 7);
        assert_eq!(rows(Init::Accumulate), 10 + 2 * 5);
    }
}
