//! Rotary positions (Su et al. 2021).

use super::Positions;
use super::check::{Check, Checked};
use super::contract::{Contract, Cost};
use super::declaration::operation;
use super::operand::Operand;
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

    /// Columns that are not turned stay.
    fn cost(&self) -> Cost {
        let operands = self.declared_operands();
        let bytes: u64 = operands.iter().map(Operand::bytes).sum();
        let unturned = self.head_dim - 2 * self.table.dims()[2];
        Cost {
            flops: 0,
            bytes: bytes - operands[0].bytes() / self.head_dim as u64 * unturned as u64,
        }
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

#[cfg(test)]
mod tests {
    use crate::{Operation, Positions, Rotary, SplitQkv, Turn};
    use memory::{Buffer, Category, DType, Memory};

    fn lease(memory: &Memory, dims: &[usize]) -> Buffer {
        let dims = memory::Dims::try_from(dims).unwrap();
        let lease = memory.lease(Category::Temporary, "x", dims, DType::F32);
        lease.unwrap()
    }

    #[test]
    fn columns_count_where_they_are_turned_and_tables_once() {
        let memory = Memory::shapes();
        let (mut x, table) = (lease(&memory, &[5, 24]), lease(&memory, &[2, 7, 3]));
        let (table, positions) = (table.view(), Positions::Sequences(5));
        let bytes = |operation: Operation| operation.cost().bytes;
        let rotary = Rotary {
            x: x.view_mut(),
            head_dim: 8,
            table,
            positions,
            inverse: false,
        };
        assert_eq!(bytes(rotary.into()), 4 * (2 * 5 * 3 * 6 + 2 * 5 * 3));
        let split = |q_table| {
            bytes(Operation::from(SplitQkv {
                q: None,
                k: None,
                v: None,
                qkv: x.view(),
                kv_widths: [8, 8],
                turn: Some(Turn {
                    head_dim: 8,
                    table,
                    q_table,
                    positions,
                }),
            }))
        };
        assert_eq!(split(None), 4 * (5 * 24 + 2 * 5 * 3));
        assert_eq!(split(Some(table)), 4 * (5 * 24 + 2 * 2 * 5 * 3));
    }
}
