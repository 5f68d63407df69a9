//! Positions of tokens, and learned positions: a row of a table per position.

use super::Init;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::{Field, Visit, operation};
use super::operand::OperandRule;
use memory::{In, Out};

/// The position of each token in its sequence or document.
#[derive(Clone, Copy)]
pub enum Positions<'a> {
    /// Whole sequences of this many tokens, with positions from 0 on.
    Sequences(usize),
    /// `[t]` i32, each within the table, which the code that makes them checks.
    Given(In<'a>),
}

impl Positions<'_> {
    /// Refuses positions for another number than `tokens`, and sequences longer than a table of `rows` positions.
    pub(super) fn check(&self, check: &Check, tokens: usize, rows: usize) -> Checked {
        let &Positions::Sequences(seq) = self else {
            return Ok(());
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
}

impl Field for Positions<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        match self {
            Positions::Sequences(_) => Ok(()),
            Positions::Given(positions) => positions.visit(rule.named("positions"), visit),
        }
    }
}

operation! {
    /// `x [t, h] += table [p, h]`, row by row: a token at position `i` gets row `i`.
    AddPositions "add_positions": x [t, h], table [p, _] {
        x: Out<'a> [t, h] changes,
        table: In<'a> [p, h] touched(positions.table_rows(t, p)),
        positions: Positions<'a> [t] i32,
    }

    /// `dtable [p, h] = init + ` the rows of `dx [t, h]`, each added to the row of its position, in order. A gradient: f32
    /// or bf16, summed in f32 and rounded once. Rows of positions without a token become zero, or, when accumulating, stay.
    AddPositionsBackward "add_positions_backward": dx [t, h], dtable [p, _] {
        dtable: Out<'a> [p, h] real plus(init) touched(init.touched(positions.table_rows(t, p), p)),
        dx: In<'a> [t, h] real,
        positions: Positions<'a> [t] i32,
        init: Init<'a> [] in_place,
    }
}

impl Contract for AddPositions<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let [tokens, rows] = [self.x.dims()[0], self.table.dims()[0]];
        self.positions.check(check, tokens, rows)
    }
}

impl Contract for AddPositionsBackward<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let [tokens, rows] = [self.dx.dims()[0], self.dtable.dims()[0]];
        self.positions.check(check, tokens, rows)
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
