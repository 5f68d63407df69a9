//! Experts: a product an expert, the weighed activation, and the sum of each token's rows.

use super::dispatch::by_dtype;
use super::elementwise::fill;
use super::gemm::{FEW_ROWS, Matrix, Output, product, product_of_few_rows};
use super::products::{matrix_of, multiply_by_expert, multiply_gradients, rows_of};
use super::simd::{CHUNK, Real, exp, lane_sum, vectorized};
use super::{Cpu, Shared, overwrites};
use crate::operation::{
    ExpertRows, Fill, GroupedGradient, GroupedMatmul, SumRows, WeighedSwiglu, WeighedSwigluBackward,
};
use crate::{Init, Target};
use memory::{In, Out};
use rayon::prelude::*;
use std::ops::Range;

/// Rows and columns of the output that one call of the library computes for f32. Bounds what it packs, and makes tasks of
/// experts with few rows.
const PIECE: [usize; 2] = [256, 512];

/// Columns of a token's rows that are added up at a time.
const COLUMNS: usize = 256;

/// Rows of f32 in the order of experts: those of tokens are gathered in scratch.
fn in_order<'a>(rows: ExpertRows<'a>, scratch: &'a mut [f32]) -> In<'a> {
    let ExpertRows { x, row_token } = rows;
    let Some(row_token) = row_token else {
        return x;
    };
    let dims = rows.dims();
    let width = dims[1].max(1);
    let (x, tokens) = (x.slice::<f32>(), row_token.slice::<i32>());
    let at_a_time = rows_of_a_task(width);
    let tasks = scratch.par_chunks_mut(at_a_time * width);
    tasks
        .zip(tokens.par_chunks(at_a_time))
        .for_each(|(rows, tokens)| {
            for (row, token) in rows.chunks_exact_mut(width).zip(tokens) {
                row.copy_from_slice(&x[*token as usize * width..][..width]);
            }
        });
    In::of_slice(scratch, dims)
}

fn rows_of_a_task(width: usize) -> usize {
    (CHUNK / width.max(1)).max(1)
}

pub(super) fn sum_rows(op: SumRows) {
    by_dtype!(op.out.dtype(), sum_rows_of(op));
}

fn sum_rows_of<T: Real>(op: SumRows) {
    let (width, choices) = (op.out.dims()[1].max(1), op.slot_row.dims()[1]);
    let (rows, slots) = (op.rows.slice::<T>(), op.slot_row.slice::<i32>());
    let residual = match op.init {
        Init::Add(residual) => Some(residual.slice::<T>()),
        _ => None,
    };
    let accumulate = matches!(op.init, Init::Accumulate);
    let at_a_time = rows_of_a_task(width);
    let tasks = op.out.slice_mut::<T>().par_chunks_mut(at_a_time * width);
    tasks.enumerate().for_each(|(task, out)| {
        for (index, out) in out.chunks_exact_mut(width).enumerate() {
            let token = task * at_a_time + index;
            let slots = &slots[token * choices..][..choices];
            let residual = residual.map(|residual| &residual[token * width..][..width]);
            sum_of_rows(out, rows, slots, residual, accumulate);
        }
    });
}

pub(super) fn grouped_matmul(cpu: &Cpu, op: GroupedMatmul) {
    match cpu.packing(&[op.rows.x.dtype()]) {
        Some(mut room) => multiply_by_expert(op, &mut room, cpu.instructions),
        None => grouped_matmul_f32(op),
    }
}

fn grouped_matmul_f32(op: GroupedMatmul) {
    let x = in_order(op.rows, op.scratch.slice_mut());
    let width = op.out.dims()[1];
    let out = Shared(op.out.pointer().cast::<f32>());
    for_each_expert(op.offsets, |expert, rows| {
        let out = Output::rows(out.at(rows.start * width), width);
        let weights = matrix_of(op.weights, expert);
        let weights = if op.by_columns { weights } else { weights.t() };
        product_in_pieces(SharedOutput(out), [x.rows(rows), weights]);
    });
}

fn for_each_expert(offsets: In, run: impl Fn(usize, Range<usize>) + Sync) {
    let offsets = offsets.slice::<i32>();
    let experts = (0..offsets.len() - 1).into_par_iter();
    experts
        .with_max_len(1)
        .for_each(|expert| run(expert, rows_of(offsets, expert)));
}

/// An output that several tasks write in disjoint places.
#[derive(Clone, Copy)]
struct SharedOutput(Output);

// SAFETY: `product_in_pieces` gives each task a piece of its own.
unsafe impl Sync for SharedOutput {}

impl SharedOutput {
    /// The part of the output that begins at a row and a column.
    fn starting_at(&self, row: usize, column: usize) -> Output {
        let out = self.0.starting_at_row(row);
        let pointer = out.pointer.wrapping_add(column);
        Output { pointer, ..out }
    }
}

/// A product of f32. Its pieces follow from its sizes alone, because the order of their sums may depend on their own.
fn product_in_pieces(out: SharedOutput, [a, b]: [In; 2]) {
    let (rows, depth, columns) = (a.dims()[0], a.dims()[1], b.dims()[1]);
    let is_by_columns = !b.is_by_rows();
    let piece = if is_by_columns {
        [FEW_ROWS, PIECE[1]]
    } else {
        PIECE
    };
    let starts = |size: usize, piece| (0..size).into_par_iter().step_by(piece);
    starts(rows, piece[0]).for_each(|row| {
        starts(columns, piece[1]).for_each(|column| {
            let a = Matrix::of(a).starting_at_row(row);
            let b = Matrix::of(b).starting_at_column(column);
            let out = out.starting_at(row, column);
            let sizes = [rows - row, columns - column];
            let sizes = (sizes[0].min(piece[0]), sizes[1].min(piece[1]), depth);
            // SAFETY: the views are in bounds, and the piece of the output is this task's alone.
            unsafe {
                match is_by_columns {
                    true => product_of_few_rows(sizes, out, a, b),
                    false => product(sizes, out, a, b, 1.0),
                }
            }
        });
    });
}

pub(super) fn grouped_gradient(cpu: &Cpu, mut op: GroupedGradient) {
    if overwrites(&op.init) {
        clear_experts_without_rows(op.out.reborrow(), op.offsets);
    }
    match cpu.packing(&[op.out.dtype(), op.dy.x.dtype()]) {
        Some(mut room) => multiply_gradients(op, &mut room, cpu.instructions),
        None => grouped_gradient_f32(op),
    }
}

fn clear_experts_without_rows(out: Out, offsets: In) {
    let [experts, rows, columns] = out.dims().try_into().expect("the rank was checked");
    let mut out = out.reshape([experts * rows, columns]);
    for expert in 0..experts {
        if rows_of(offsets.slice(), expert).is_empty() {
            let out = out.reborrow().rows(expert * rows..(expert + 1) * rows);
            fill(Fill { out, value: 0.0 });
        }
    }
}

fn grouped_gradient_f32(op: GroupedGradient) {
    let of_dy = op.dy.scratch_elements(Target::Cpu);
    let (of_dy, of_x) = op.scratch.slice_mut().split_at_mut(of_dy);
    let (dy, x) = (in_order(op.dy, of_dy), in_order(op.rows, of_x));
    let [outputs, inner] = [op.out.dims()[1], op.out.dims()[2]];
    let out = Shared(op.out.pointer().cast::<f32>());
    let accumulate = matches!(op.init, Init::Accumulate);
    for_each_expert(op.offsets, |expert, rows| {
        if !rows.is_empty() {
            let out = Output::rows(out.at(expert * outputs * inner), inner);
            let out = SharedOutput(out.accumulating(accumulate));
            product_in_pieces(out, [dy.rows(rows.clone()).t(), x.rows(rows)]);
        }
    });
}

pub(super) fn weighed_swiglu(op: WeighedSwiglu) {
    by_dtype!(op.act.dtype(), weighed_swiglu_of(op));
}

fn weighed_swiglu_of<T: Real>(op: WeighedSwiglu) {
    let (width, gate_up) = (op.act.dims()[1].max(1), op.gate_up.slice::<T>());
    let rows = rows_of_a_task(width);
    let tasks = op.act.slice_mut::<T>().par_chunks_mut(rows * width);
    let tasks = tasks.zip(gate_up.par_chunks(rows * 2 * width)).enumerate();
    tasks.for_each(|(task, (act, gate_up))| {
        let gate_up = gate_up.chunks_exact(2 * width);
        for (index, (act, gate_up)) in act.chunks_exact_mut(width).zip(gate_up).enumerate() {
            let slot = slot_of(op.row_slot, task * rows + index);
            let (gate, up) = gate_up.split_at(width);
            forward(act, gate, up, op.weights.slice::<f32>()[slot]);
        }
    });
}

/// The place of a row's weight.
fn slot_of(row_slot: Option<In>, row: usize) -> usize {
    row_slot.map_or(row, |slots| slots.slice::<i32>()[row] as usize)
}

pub(super) fn weighed_swiglu_backward(op: WeighedSwigluBackward) {
    by_dtype!(op.dact.dtype(), weighed_swiglu_backward_of(op));
}

fn weighed_swiglu_backward_of<T: Real>(op: WeighedSwigluBackward) {
    let (width, weights) = (op.dact.dims()[1].max(1), op.weights.slice::<f32>());
    let dweights = Shared(op.dweights.pointer().cast::<f32>());
    let rows = rows_of_a_task(width);
    let tasks = op.gate_up.slice_mut::<T>().par_chunks_mut(rows * 2 * width);
    let tasks = tasks.zip(op.dact.slice::<T>().par_chunks(rows * width));
    tasks.enumerate().for_each(|(task, (gate_up, dact))| {
        let dact = dact.chunks_exact(width);
        for (index, (gate_up, dact)) in gate_up.chunks_exact_mut(2 * width).zip(dact).enumerate() {
            let slot = slot_of(op.row_slot, task * rows + index);
            let (gate, up) = gate_up.split_at_mut(width);
            let weight = weights[slot];
            // SAFETY: there is a weight for this slot, so there is its gradient; no other row has the slot.
            unsafe { *dweights.at(slot) = gradient_of_weight(gate, up, dact) };
            backward(gate, up, dact, weight);
        }
    });
}

vectorized! {
    /// Adds the rows in the order of the slots, then what was there or the residual, and rounds once.
    fn sum_of_rows<T: Real>(out: &mut [T], rows: &[T], slots: &[i32], residual: Option<&[T]>, accumulate: bool) {
        let width = out.len();
        for (block, out) in out.chunks_mut(COLUMNS).enumerate() {
            let (start, count) = (block * COLUMNS, out.len());
            let mut sums = [0.0f32; COLUMNS];
            for slot in slots {
                let row = &rows[*slot as usize * width + start..][..count];
                for (sum, row) in sums.iter_mut().zip(row) {
                    *sum += row.widen();
                }
            }
            if let Some(residual) = residual {
                for (sum, residual) in sums.iter_mut().zip(&residual[start..start + count]) {
                    *sum += residual.widen();
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = T::narrow(if accumulate { sum + out.widen() } else { sum });
            }
        }
    }

    fn forward<T: Real>(act: &mut [T], gate: &[T], up: &[T], weight: f32) {
        for ((act, gate), up) in act.iter_mut().zip(gate).zip(up) {
            let gate = gate.widen();
            *act = T::narrow(weight * (gate / (1.0 + exp(-gate)) * up.widen()));
        }
    }

    fn gradient_of_weight<T: Real>(gate: &[T], up: &[T], dact: &[T]) -> f32 {
        lane_sum([gate, up, dact], |[gate, up, dact]| dact * (gate / (1.0 + exp(-gate)) * up))
    }

    fn backward<T: Real>(gate: &mut [T], up: &mut [T], dact: &[T], weight: f32) {
        for ((gate, up), dact) in gate.iter_mut().zip(up).zip(dact) {
            let (g, u, d) = (gate.widen(), up.widen(), weight * dact.widen());
            let sigmoid = 1.0 / (1.0 + exp(-g));
            let silu = g * sigmoid;
            *gate = T::narrow(d * u * (sigmoid + silu * (1.0 - sigmoid)));
            *up = T::narrow(d * silu);
        }
    }
}
