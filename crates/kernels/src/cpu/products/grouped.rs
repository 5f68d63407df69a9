//! Products of experts. Each is small: several run at a time, each with a part of the workspace, so that threads need
//! not wait for one another after every expert.

use super::pack::TableOf;
use super::store::{Added, Output};
use super::tiles::{DEPTH, SIDE};
use super::{Instructions, Operand, PackedSquares, Product, RIGHT_PANELS};
use crate::Init;
use crate::operation::{ExpertRows, GroupedGradient, GroupedMatmul};
use memory::In;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of an expert.
pub(in crate::cpu) fn rows_of(offsets: &[i32], expert: usize) -> Range<usize> {
    offsets[expert] as usize..offsets[expert + 1] as usize
}

/// An expert's matrix of `[e, rows, columns]`.
pub(in crate::cpu) fn matrix_of(tensor: In, expert: usize) -> In {
    let [experts, rows, columns] = tensor.dims().try_into().expect("the rank was checked");
    let all = tensor.reshape([experts * rows, columns]);
    all.rows(expert * rows..(expert + 1) * rows)
}

/// Rows of an expert as an operand, which finds those of tokens by their table.
fn operand_of(all: ExpertRows, rows: Range<usize>) -> Operand {
    match tokens_of(all, &rows) {
        Some(tokens) => Operand::of(all.x).listed(tokens, TableOf::Rows),
        None => Operand::of(all.x.rows(rows)),
    }
}

/// The same, transposed: the rows are places of the depth.
fn transposed(all: ExpertRows, rows: Range<usize>) -> Operand {
    match tokens_of(all, &rows) {
        Some(tokens) => Operand::of(all.x.t()).listed(tokens, TableOf::Places),
        None => Operand::of(all.x.rows(rows).t()),
    }
}

/// The tokens of an expert's rows, if a table has them. Packing reads them unchecked.
fn tokens_of<'a>(all: ExpertRows<'a>, rows: &Range<usize>) -> Option<&'a [i32]> {
    let tokens = &all.row_token?.slice::<i32>()[rows.clone()];
    let exists = |token: &i32| (*token as usize) < all.x.dims()[0];
    assert!(tokens.iter().all(exists), "a row's token is none of `rows`");
    Some(tokens)
}

/// [`GroupedMatmul`] of bf16. The left operand is always the weights: they are read once, and a strip of them needs
/// room on the stack alone, while an expert's few rows are what all strips share.
pub(in crate::cpu) fn multiply_by_expert(
    op: GroupedMatmul,
    workspace: &mut [f32],
    instructions: Instructions,
) {
    let instructions = instructions.of([op.rows.x, op.weights]);
    let [_, depth] = op.rows.dims();
    let added = Added {
        bias: None,
        init: Init::Overwrite,
    };
    let out = Output::new(op.out, added, true);
    let parts = Parts {
        offsets: op.offsets.slice(),
        unit: SIDE,
        squares: depth.div_ceil(DEPTH).max(1) * instructions.squares(),
    };
    parts.for_each(PackedSquares::all(workspace), |expert, rows, room| {
        let weights = matrix_of(op.weights, expert);
        let weights = if op.by_columns { weights.t() } else { weights };
        let operands = [Operand::of(weights), operand_of(op.rows, rows.clone())];
        Product::new(operands, depth, out.rows(rows), room, instructions).run();
    });
}

/// [`GroupedGradient`] where a type is bf16, of the experts that have rows.
pub(in crate::cpu) fn multiply_gradients(
    op: GroupedGradient,
    workspace: &mut [f32],
    instructions: Instructions,
) {
    let instructions = instructions.of([op.dy.x, op.rows.x]);
    let [experts, outputs, inner] = op.out.dims().try_into().expect("the rank was checked");
    let is_turned = inner > outputs;
    let added = Added {
        bias: None,
        init: op.init,
    };
    let out = Output::new(op.out.reshape([experts * outputs, inner]), added, is_turned);
    let panels = outputs.min(inner).div_ceil(SIDE).min(RIGHT_PANELS);
    let parts = Parts {
        offsets: op.offsets.slice(),
        unit: DEPTH,
        squares: panels * instructions.squares(),
    };
    parts.for_each(PackedSquares::all(workspace), |expert, rows, room| {
        let depth = rows.len();
        let [dy, x] = [op.dy, op.rows].map(|all| transposed(all, rows.clone()));
        let operands = if is_turned { [x, dy] } else { [dy, x] };
        let out = out.rows(expert * outputs..(expert + 1) * outputs);
        Product::new(operands, depth, out, room, instructions).run();
    });
}

/// How experts share the workspace.
struct Parts<'a> {
    offsets: &'a [i32],
    /// An expert needs room for its rows in units of so many, the last of which may not be full.
    unit: usize,
    /// Squares of a unit.
    squares: usize,
}

impl Parts<'_> {
    /// Squares that are enough for some experts side by side: of the units that all their rows fill, and one for the rest
    /// of each.
    fn squares(&self, experts: Range<usize>) -> usize {
        let rows = self.offsets[experts.end] - self.offsets[experts.start];
        (rows as usize / self.unit + experts.len()) * self.squares
    }

    /// Calls `run` for every expert that has rows: at a time those that follow one another and fit into the room. One
    /// that does not fit has all of it.
    fn for_each(
        &self,
        room: PackedSquares,
        run: impl Fn(usize, Range<usize>, PackedSquares) + Sync,
    ) {
        let experts = self.offsets.len() - 1;
        let mut first = 0;
        while first < experts {
            let fits = |end: &usize| self.squares(first..*end) <= room.squares;
            let end = (first + 2..=experts).take_while(fits).last();
            let end = end.unwrap_or(first + 1);
            let experts = (first..end).into_par_iter().with_max_len(1);
            experts.for_each(|expert| {
                let rows = rows_of(self.offsets, expert);
                let part = self.squares(first..expert)..self.squares(first..expert + 1);
                let room = match end - first {
                    1 => room,
                    _ => room.part(part),
                };
                if !rows.is_empty() {
                    run(expert, rows, room);
                }
            });
            first = end;
        }
    }
}
