//! Positions of tokens, and learned positions: a row of a table per position.

use super::Init;
use super::check::{Check, Checked};
use super::contract::{Contract, Operand, OperandAccess, changes, reads, writes};
use memory::{DType, In, Out};

/// The position of each token in its sequence or document.
#[derive(Clone, Copy)]
pub enum Positions<'a> {
    /// Whole sequences of this many tokens, with positions from 0 on.
    Sequences(usize),
    /// `[t]` i32, each within the table, which the code that makes them checks.
    Given(In<'a>),
}

impl<'a> Positions<'a> {
    /// Refuses positions for another number than `tokens`, and sequences longer than a table of `rows` positions.
    pub(super) fn check(&self, check: &Check, tokens: usize, rows: usize) -> Checked {
        let seq = match self {
            Positions::Given(positions) => {
                return check.tensor("positions", positions, &[tokens], DType::I32);
            }
            Positions::Sequences(seq) => *seq,
        };
        check.that(seq > 0 && tokens.is_multiple_of(seq), || {
            format!("{tokens} rows are not whole sequences of {seq}")
        })?;
        check.that(seq <= rows, || {
            format!("sequences of {seq} are longer than a table of {rows} positions")
        })
    }

    /// The most rows of a table that are used.
    pub(super) fn table_rows(&self, tokens: usize, rows: usize) -> usize {
        match self {
            Positions::Sequences(seq) => *seq,
            Positions::Given(_) => tokens.min(rows),
        }
    }

    /// The tensor of given positions, if any.
    pub(crate) fn given(&self) -> Option<In<'a>> {
        match self {
            Positions::Sequences(_) => None,
            Positions::Given(positions) => Some(*positions),
        }
    }
}

/// `x [t, h] += table [p, h]`, row by row: a token at position `i` gets row `i`.
pub struct AddPositions<'a> {
    pub x: Out<'a>,
    pub table: In<'a>,
    pub positions: Positions<'a>,
}

/// `dtable [p, h] = init + ` the rows of `dx [t, h]`, each added to the row of its position, in order. A gradient: f32
/// or bf16, summed in f32 and rounded once. Rows of positions without a token become zero, or, when accumulating, stay.
pub struct AddPositionsBackward<'a> {
    pub dtable: Out<'a>,
    pub dx: In<'a>,
    pub positions: Positions<'a>,
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
        self.positions.check(check, rows, positions)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let (tokens, rows) = (self.x.dims()[0], self.table.dims()[0]);
        let rows = self.positions.table_rows(tokens, rows);
        let read = [self.table.rows(0..rows)]
            .into_iter()
            .chain(self.positions.given());
        [changes(&self.x)]
            .into_iter()
            .chain(read.map(reads))
            .collect()
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
        self.positions.check(check, rows, positions)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let (tokens, rows) = (self.dx.dims()[0], self.dtable.dims()[0]);
        let rows = self.positions.table_rows(tokens, rows);
        let dtable = match self.init {
            Init::Overwrite => writes(&self.dtable),
            Init::Accumulate | Init::Add(_) => Operand {
                view: self.dtable.as_in().rows(0..rows),
                access: OperandAccess::Changed,
            },
        };
        let given = self.positions.given().map(reads);
        [reads(self.dx), dtable].into_iter().chain(given).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::{AddPositionsBackward, Init, Operation, Positions};
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
                positions: Positions::Sequences(5),
                init,
            };
            Operation::from(operation).cost().bytes / (3 * 4)
        };
        assert_eq!(rows(Init::Overwrite), 10 + 7);
        assert_eq!(rows(Init::Accumulate), 10 + 2 * 5);
    }
}
