//! Experts: a product an expert, the weighed activation, and the sum of each token's rows.

use super::dispatch::{by_dtype, by_dtypes};
use super::elementwise::fill;
use super::gate::{Gate, by_gate};
use super::gemm::{FEW_ROWS, Matrix, Output, product, product_of_few_rows};
use super::products::{matrix_of, multiply_by_expert, multiply_gradients, rows_of};
use super::simd::{CHUNK, Real, lane_sum, vectorized};
use super::{Cpu, Shared, overwrites};
use crate::operation::{
    ExpertBias, ExpertBiasDweights, ExpertBiasGradient, ExpertRows, Fill, GroupedGradient,
    GroupedMatmul, SumRows, WeighedGatedActivation, WeighedGatedActivationBackward,
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
            let choices = token * choices..(token + 1) * choices;
            let residual = residual.map(|residual| &residual[token * width..][..width]);
            let biases = op.bias.map(|bias| {
                let ids = &bias.of.ids.slice::<i32>()[choices.clone()];
                let weights = &bias.weights.slice::<f32>()[choices.clone()];
                (bias.of.bias.slice::<T>(), ids, weights)
            });
            sum_of_rows(out, rows, &slots[choices], biases, residual, accumulate);
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

pub(super) fn weighed_gated_activation(op: WeighedGatedActivation) {
    by_gate!(op.act.dtype(), op.function, activate(op));
}

fn activate<T: Real>(op: WeighedGatedActivation, function: impl Gate) {
    let (width, gate_up) = (op.act.dims()[1].max(1), op.gate_up.slice::<T>());
    let rows = rows_of_a_task(width);
    let tasks = op.act.slice_mut::<T>().par_chunks_mut(rows * width);
    let tasks = tasks.zip(gate_up.par_chunks(rows * 2 * width)).enumerate();
    tasks.for_each(|(task, (act, gate_up))| {
        let gate_up = gate_up.chunks_exact(2 * width);
        for (index, (act, gate_up)) in act.chunks_exact_mut(width).zip(gate_up).enumerate() {
            let slot = slot_of(op.row_slot, task * rows + index);
            let (gate, up) = gate_up.split_at(width);
            let weight = op.weights.slice::<f32>()[slot];
            match own_bias(&op.bias, slot) {
                None => forward(act, [gate, up, gate, up], weight, function, NoBias),
                Some([of_gate, of_up]) => {
                    let rows = [gate, up, of_gate, of_up];
                    forward(act, rows, weight, function, AddedBias);
                }
            }
        }
    });
}

/// The place of a row's weight.
fn slot_of(row_slot: Option<In>, row: usize) -> usize {
    row_slot.map_or(row, |slots| slots.slice::<i32>()[row] as usize)
}

pub(super) fn weighed_gated_activation_backward(op: WeighedGatedActivationBackward) {
    by_gate!(op.dact.dtype(), op.function, gradients(op));
}

fn gradients<T: Real>(op: WeighedGatedActivationBackward, function: impl Gate) {
    let (width, weights) = (op.dact.dims()[1].max(1), op.weights.slice::<f32>());
    let dweights = Shared(op.dweights.pointer().cast::<f32>());
    let replace = overwrites(&op.dweights_init);
    let rows = rows_of_a_task(width);
    let tasks = op.gate_up.slice_mut::<T>().par_chunks_mut(rows * 2 * width);
    let tasks = tasks.zip(op.dact.slice::<T>().par_chunks(rows * width));
    tasks.enumerate().for_each(|(task, (gate_up, dact))| {
        let dact = dact.chunks_exact(width);
        for (index, (gate_up, dact)) in gate_up.chunks_exact_mut(2 * width).zip(dact).enumerate() {
            let slot = slot_of(op.row_slot, task * rows + index);
            let (both, weight) = (gate_up.split_at_mut(width), weights[slot]);
            let sum = match own_bias(&op.bias, slot) {
                None => backward(both, [dact; 3], weight, function, NoBias),
                Some([of_gate, of_up]) => {
                    let rows = [dact, of_gate, of_up];
                    backward(both, rows, weight, function, AddedBias)
                }
            };
            // SAFETY: there is a weight for this slot, so there is its gradient; no other row has the slot.
            let dweight = unsafe { &mut *dweights.at(slot) };
            *dweight = if replace { sum } else { *dweight + sum };
        }
    });
}

/// The bias of the expert of a choice: gate's and up's.
fn own_bias<'a, T: Real>(bias: &Option<ExpertBias<'a>>, slot: usize) -> Option<[&'a [T]; 2]> {
    let ExpertBias { bias, ids } = bias.as_ref()?;
    let width = bias.dims()[1];
    let row = &bias.slice()[ids.slice::<i32>()[slot] as usize * width..][..width];
    Some(row.split_at(width / 2).into())
}

/// Whether loops add a bias. Without one they get rows that are not read.
trait Bias: Copy {
    fn add(self, x: f32, bias: f32) -> f32;
}

#[derive(Clone, Copy)]
struct NoBias;

impl Bias for NoBias {
    #[inline(always)]
    fn add(self, x: f32, _bias: f32) -> f32 {
        x
    }
}

#[derive(Clone, Copy)]
struct AddedBias;

impl Bias for AddedBias {
    #[inline(always)]
    fn add(self, x: f32, bias: f32) -> f32 {
        x + bias
    }
}

pub(super) fn expert_bias_gradient(op: ExpertBiasGradient) {
    by_dtypes!(op.out.dtype(), op.dy.x.dtype(), sums_by_expert(op));
}

fn sums_by_expert<G: Real, T: Real>(op: ExpertBiasGradient) {
    let (width, overwrite) = (op.out.dims()[1].max(1), overwrites(&op.init));
    let (dy, offsets) = (op.dy.x.slice::<T>(), op.offsets.slice::<i32>());
    let experts = op.out.slice_mut::<G>().par_chunks_mut(width).enumerate();
    experts.for_each(|(expert, out)| {
        let rows = rows_of(offsets, expert);
        if rows.is_empty() && !overwrite {
            return;
        }
        let blocks = out.par_chunks_mut(COLUMNS).enumerate();
        blocks.for_each(|(block, out)| {
            let mut sums = [0.0; COLUMNS];
            for row in rows.clone() {
                let token = op
                    .dy
                    .row_token
                    .map_or(row, |of| of.slice::<i32>()[row] as usize);
                let weight = op.weights.map_or(1.0, |of| {
                    of.weights.slice::<f32>()[slot_of(of.row_slot, row)]
                });
                let first = token * width + block * COLUMNS;
                add_weighed(&mut sums, &dy[first..][..out.len()], weight);
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = G::narrow(if overwrite { sum } else { out.widen() + sum });
            }
        });
    });
}

pub(super) fn expert_bias_dweights(op: ExpertBiasDweights) {
    by_dtype!(op.dy.dtype(), dweights_of(op));
}

fn dweights_of<T: Real>(op: ExpertBiasDweights) {
    let (choices, width) = (op.dweights.dims()[1], op.dy.dims()[1]);
    let (dy, bias) = (op.dy.slice::<T>(), op.bias.bias.slice::<T>());
    let slots = op.dweights.slice_mut::<f32>().par_iter_mut();
    let slots = slots.zip(op.bias.ids.slice::<i32>()).enumerate();
    slots.for_each(|(slot, (dweight, id))| {
        let dy = &dy[slot / choices * width..][..width];
        *dweight = product_of_rows(dy, &bias[*id as usize * width..][..width]);
    });
}

vectorized! {
    /// Adds the rows in the order of the slots, then what was there or the residual, and rounds once.
    fn sum_of_rows<T: Real>(
        out: &mut [T],
        rows: &[T],
        slots: &[i32],
        biases: Option<(&[T], &[i32], &[f32])>,
        residual: Option<&[T]>,
        accumulate: bool,
    ) {
        let width = out.len();
        for (block, out) in out.chunks_mut(COLUMNS).enumerate() {
            let (start, count) = (block * COLUMNS, out.len());
            let mut sums = [0.0f32; COLUMNS];
            for (choice, slot) in slots.iter().enumerate() {
                let row = &rows[*slot as usize * width + start..][..count];
                for (sum, row) in sums.iter_mut().zip(row) {
                    *sum += row.widen();
                }
                if let Some((bias, ids, weights)) = biases {
                    let (bias, weight) = (&bias[ids[choice] as usize * width + start..][..count], weights[choice]);
                    for (sum, bias) in sums.iter_mut().zip(bias) {
                        *sum += weight * bias.widen();
                    }
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

    fn forward<T: Real, G: Gate, B: Bias>(act: &mut [T], rows: [&[T]; 4], weight: f32, function: G, bias: B) {
        let [gate, up, of_gate, of_up] = rows;
        let rows = gate.iter().zip(up).zip(of_gate.iter().zip(of_up));
        for (act, ((gate, up), (of_gate, of_up))) in act.iter_mut().zip(rows) {
            let gate = bias.add(gate.widen(), of_gate.widen());
            let up = bias.add(up.widen(), of_up.widen());
            *act = T::narrow(weight * function.act(gate, up));
        }
    }

    /// Returns the gradient of the weight. `rows`: the gradient of act, and the bias.
    fn backward<T: Real, G: Gate, B: Bias>(
        both: (&mut [T], &mut [T]),
        rows: [&[T]; 3],
        weight: f32,
        function: G,
        bias: B,
    ) -> f32 {
        let ((gate, up), [dact, of_gate, of_up]) = (both, rows);
        let sum = lane_sum([&*gate, &*up, dact, of_gate, of_up], |[gate, up, dact, of_gate, of_up]| {
            dact * function.act(bias.add(gate, of_gate), bias.add(up, of_up))
        });
        let rows = dact.iter().zip(of_gate.iter().zip(of_up));
        for ((gate, up), (dact, (of_gate, of_up))) in gate.iter_mut().zip(up).zip(rows) {
            let of = function.gated(
                bias.add(gate.widen(), of_gate.widen()),
                bias.add(up.widen(), of_up.widen()),
            );
            let d = weight * dact.widen();
            *gate = T::narrow(d * of.factor * of.slope);
            *up = T::narrow(d * of.passed * of.factor_slope);
        }
        sum
    }

    fn add_weighed<T: Real>(sums: &mut [f32; COLUMNS], row: &[T], weight: f32) {
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += weight * x.widen();
        }
    }

    fn product_of_rows<T: Real>(a: &[T], b: &[T]) -> f32 {
        lane_sum([a, b], |[a, b]| a * b)
    }
}
