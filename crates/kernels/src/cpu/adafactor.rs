//! Adafactor on ranges of a tensor.

use super::dispatch::by_dtype;
use super::norm::{sum_of_grains, sum_of_groups};
use super::quantise::Codec;
use super::simd::{Real, vectorized};
use super::states::{Buffers, ByBlock, Random, Values, WeightsAt, in_blocks, weights_at};
use super::{Shared, part, shared};
use crate::operation::{
    AdafactorRate, AdafactorStep, FactorVariance, MatricesShape, SQUARE_PARTS, UpdateSquares,
    VarianceOperand, VarianceScale, VarianceSums, WeightSquares,
};
use crate::quantise::BLOCK;
use rayon::prelude::*;
use std::ops::Range;

/// Neighbours that a thread of a CUDA kernel loads at once. The order of sums depends on it.
const PACK: usize = 8;

/// Columns that one task sums.
const TILE: usize = 128;

/// Lanes of the sum of a row. The sum is of whole numbers, so the number of lanes changes no bit.
const LANES: usize = 8;

pub(super) fn variance_scale(op: VarianceScale) {
    let factor = op.clip.slice::<f32>()[1];
    let grains = op.grains.slice::<f64>();
    let largest = grains.iter().copied().fold(0.0, f64::max);
    let bound = largest.sqrt() * f64::from(factor);
    op.out.slice_mut::<f64>()[0] = above(bound);
}

/// The next power of two above a number; 1 if the number is 0 or not finite.
fn above(bound: f64) -> f64 {
    let exponent = bound.to_bits() >> 52 & 0x7ff;
    match exponent {
        0 | 0x7ff => 1.0,
        _ => f64::from_bits((exponent + 1).min(0x7fe) << 52),
    }
}

pub(super) fn variance_sums(op: VarianceSums) {
    by_dtype!(op.gradients.dtype(), variance_sums_of(op));
}

/// Gradients of a range, with the factors that their squares need.
struct Gradients<'a, T> {
    values: &'a [T],
    /// The index in the tensor of their first element.
    first: usize,
    factor: f32,
    inverse: f64,
}

fn variance_sums_of<T: Real>(op: VarianceSums) {
    let gradients = Gradients {
        values: op.gradients.slice::<T>(),
        first: op.first,
        factor: op.clip.slice::<f32>()[1],
        inverse: 1.0 / op.scale.slice::<f64>()[0],
    };
    let (by_rows, by_columns) = op
        .sums
        .slice_mut::<f64>()
        .split_at_mut(SQUARE_PARTS * op.shape.all_rows());
    let [one, other, last] = parts_of(by_rows);
    let parts = one.par_iter_mut().zip(other).zip(last).with_min_len(8);
    parts.enumerate().for_each(|(row, ((one, other), last))| {
        [*one, *other, *last] = row_sums(
            gradients.of_row(row, 0..op.shape.columns, &op.shape).1,
            &gradients,
        );
    });
    let [one, other, last] = parts_of(by_columns);
    let columns =
        |x| -> rayon::slice::ChunksMut<f64> { <[f64]>::par_chunks_mut(x, op.shape.columns) };
    let matrices = columns(one).zip(columns(other)).zip(columns(last));
    matrices
        .enumerate()
        .for_each(|(matrix, ((one, other), last))| {
            let tiles = one.par_chunks_mut(TILE).zip(other.par_chunks_mut(TILE));
            let tiles = tiles.zip(last.par_chunks_mut(TILE)).enumerate();
            tiles.for_each(|(tile, ((one, other), last))| {
                [&mut *one, &mut *other, &mut *last]
                    .into_iter()
                    .for_each(|part| part.fill(0.0));
                let columns = tile * TILE..tile * TILE + one.len();
                for row in matrix * op.shape.rows..(matrix + 1) * op.shape.rows {
                    let (from, run) = gradients.of_row(row, columns.clone(), &op.shape);
                    add_columns(
                        run,
                        &gradients,
                        [&mut one[from..], &mut other[from..], &mut last[from..]],
                    );
                }
            });
        });
}

/// The parts of sums that are as many.
fn parts_of(sums: &mut [f64]) -> [&mut [f64]; SQUARE_PARTS] {
    let (one, rest) = sums.split_at_mut(sums.len() / SQUARE_PARTS);
    let (other, last) = rest.split_at_mut(rest.len() / 2);
    [one, other, last]
}

impl<T> Gradients<'_, T> {
    /// The values of the range that lie in these columns of a row, and how many of these columns come before the range.
    fn of_row(&self, row: usize, columns: Range<usize>, shape: &MatricesShape) -> (usize, &[T]) {
        let first = row * shape.columns;
        let wanted = first + columns.start..first + columns.end;
        let own = clamped(wanted.clone(), self.first..self.first + self.values.len());
        match own.is_empty() {
            true => (0, &[]),
            false => (
                own.start - wanted.start,
                &self.values[own.start - self.first..own.end - self.first],
            ),
        }
    }
}

/// The intersection of two ranges. It is empty if they do not overlap.
fn clamped(one: Range<usize>, other: Range<usize>) -> Range<usize> {
    one.start.max(other.start)..one.end.min(other.end)
}

vectorized! {
    /// The sums of some squares.
    fn row_sums<T: Real>(run: &[T], gradients: &Gradients<T>) -> [f64; SQUARE_PARTS] {
        let mut lanes = [[0.0; LANES]; SQUARE_PARTS];
        let (chunks, rest) = run.as_chunks::<LANES>();
        let mut add = |chunk: &[T]| {
            for (lane, value) in chunk.iter().enumerate() {
                for (lanes, part) in lanes.iter_mut().zip(square(*value, gradients)) {
                    lanes[lane] += part;
                }
            }
        };
        chunks.iter().for_each(|chunk| add(chunk));
        add(rest);
        lanes.map(|lanes| lanes.iter().sum())
    }

    /// Adds each square to a column.
    fn add_columns<T: Real>(run: &[T], gradients: &Gradients<T>, columns: [&mut [f64]; SQUARE_PARTS]) {
        let [one, other, last] = columns;
        for (value, ((one, other), last)) in run.iter().zip(one.iter_mut().zip(other).zip(last)) {
            let parts = square(*value, gradients);
            *one += parts[0];
            *other += parts[1];
            *last += parts[2];
        }
    }
}

/// The square of a clipped gradient in units of the scale, as whole numbers. The remainder below the last unit is left
/// out.
#[inline(always)]
fn square<T: Real>(value: T, gradients: &Gradients<T>) -> [f64; SQUARE_PARTS] {
    const PART: f64 = (1u64 << 26) as f64;
    // Adding and subtracting this rounds to the nearest whole number.
    const ROUND: f64 = 1.5 * (1u64 << 52) as f64;
    let clipped = value.widen() * gradients.factor;
    let x = f64::from(clipped) * gradients.inverse;
    let mut rest = x * x;
    let mut parts = [0.0; SQUARE_PARTS];
    for part in &mut parts {
        rest *= PART;
        *part = (rest + ROUND) - ROUND;
        rest -= *part;
    }
    parts
}

pub(super) fn factor_variance(op: FactorVariance) {
    if !op.clip.slice::<f32>()[1].is_finite() {
        return op.factors.slice_mut::<f32>().fill(0.0);
    }
    let sums = op.sums.slice::<f64>();
    let scale = op.scale.slice::<f64>()[0];
    let rate = op.rates.slice::<f32>()[0];
    let (rows, columns) = (op.rows.slice_mut::<f32>(), op.columns.slice_mut::<f32>());
    let step = |state: &mut [f32], first: usize, terms: usize| {
        let count = state.len();
        for (index, value) in state.iter_mut().enumerate() {
            let of_part = |part: usize| {
                let at = first + part * count + index;
                let all = sums.iter().skip(at).step_by(op.shape.sums());
                all.sum::<f64>()
            };
            let mean = mean_of([0, 1, 2].map(of_part), scale, terms);
            *value += rate * (mean - *value);
        }
    };
    let of_rows = SQUARE_PARTS * op.shape.all_rows();
    step(rows, 0, op.shape.columns);
    step(columns, of_rows, op.shape.rows);
    let factors = op.factors.slice_mut::<f32>().chunks_mut(op.shape.rows);
    for (rows, factors) in rows.chunks(op.shape.rows).zip(factors) {
        let mean = (sum_in_lanes(rows) / op.shape.rows as f64) as f32;
        let divisor = mean.max(op.eps);
        for (factor, row) in factors.iter_mut().zip(rows) {
            *factor = row / divisor;
        }
    }
}

/// The mean of `terms` squares, whose sum is given in whole numbers.
fn mean_of([one, other, last]: [f64; SQUARE_PARTS], scale: f64, terms: usize) -> f32 {
    const SMALLER: f64 = 1.0 / (1u64 << 26) as f64;
    let sum = ((last * SMALLER + other) * SMALLER + one) * SMALLER;
    (sum * scale * scale / terms as f64) as f32
}

/// The sum of some values, in the order of a CUDA block that has one thread per lane.
fn sum_in_lanes(values: &[f32]) -> f64 {
    const THREADS: usize = 1024;
    let mut lanes = [0.0; THREADS];
    for row in values.chunks(THREADS) {
        let pairs = lanes.iter_mut().zip(row);
        pairs.for_each(|(lane, value)| *lane += f64::from(*value));
    }
    sum_of_groups::<32>(&lanes)
}

/// A range's variance, which tasks share.
enum VarianceAt<'a> {
    Factors {
        factors: &'a [f32],
        columns: &'a [f32],
        first: usize,
        shape: MatricesShape,
    },
    Elements(Shared<f32>),
}

impl<'a> VarianceAt<'a> {
    fn of(variance: VarianceOperand<'a>) -> VarianceAt<'a> {
        match variance {
            VarianceOperand::Factors {
                factors,
                columns,
                first,
                shape,
            } => VarianceAt::Factors {
                factors: factors.slice(),
                columns: columns.slice(),
                first,
                shape,
            },
            VarianceOperand::Elements(out) => VarianceAt::Elements(shared(out)),
        }
    }

    /// The variances of some elements after the step, given their clipped gradients.
    #[inline(always)]
    fn read(&self, start: usize, gradients: &[f32], rate: f32, variances: &mut [f32]) {
        match self {
            VarianceAt::Factors {
                factors,
                columns,
                first,
                shape,
            } => {
                let (mut at, end) = (first + start, first + start + variances.len());
                let mut rest = variances;
                while at < end {
                    let (row, column) = (at / shape.columns, at % shape.columns);
                    let run = (shape.columns - column).min(end - at);
                    let (own, after) = rest.split_at_mut(run);
                    let column = row / shape.rows * shape.columns + column;
                    for (variance, factor) in own.iter_mut().zip(&columns[column..]) {
                        *variance = factors[row] * factor;
                    }
                    rest = after;
                    at += run;
                }
            }
            VarianceAt::Elements(state) => {
                // SAFETY: the block is this task's, and lies in the tensor, as its check has seen.
                let state = unsafe { part(*state, start, variances.len()) };
                for ((variance, before), gradient) in variances.iter_mut().zip(state).zip(gradients)
                {
                    *variance = *before + rate * (gradient * gradient - *before);
                }
            }
        }
    }

    /// Stores the variances that `read` returned.
    #[inline(always)]
    fn write(&self, start: usize, variances: &[f32]) {
        if let VarianceAt::Elements(state) = self {
            // SAFETY: as in `read`.
            let state = unsafe { part(*state, start, variances.len()) };
            state.copy_from_slice(variances);
        }
    }
}

/// The operands of a range's updates, which tasks share.
struct Updates<'a> {
    gradients: Values<'a>,
    variance: VarianceAt<'a>,
    factor: f32,
    rate: f32,
    eps: f32,
}

impl Updates<'_> {
    /// The updates of a block, and the variances that they are made with.
    #[inline(always)]
    fn read(&self, start: usize, updates: &mut [f32], variances: &mut [f32]) {
        self.gradients.read(start, updates);
        updates.iter_mut().for_each(|x| *x *= self.factor);
        self.variance.read(start, updates, self.rate, variances);
        for (update, variance) in updates.iter_mut().zip(variances) {
            *update /= variance.max(self.eps * self.eps).sqrt();
        }
    }
}

/// The sum of a block's squares, in the order of a CUDA warp.
#[inline(always)]
fn sum_of_squares(values: &[f32]) -> f64 {
    let mut squares = [0.0; BLOCK];
    for (square, value) in squares.iter_mut().zip(values) {
        *square = f64::from(*value) * f64::from(*value);
    }
    sum_of_groups::<PACK>(&squares)
}

/// Writes the grain of a block.
#[inline(always)]
fn set_block(grains: Shared<f64>, start: usize, sum: f64) {
    // SAFETY: the block is this task's, and its grain is in the tensor, as its check has seen.
    let grain = unsafe { part(grains, start / BLOCK, 1) };
    grain[0] = sum;
}

struct UpdateSums<'a> {
    grains: Shared<f64>,
    updates: Updates<'a>,
}

pub(super) fn update_squares(op: UpdateSquares) {
    let elements = op.gradients.elements();
    let sums = UpdateSums {
        grains: shared(op.squares),
        updates: Updates {
            gradients: Values::of(op.gradients),
            variance: VarianceAt::of(op.variance),
            factor: op.clip.slice::<f32>()[1],
            rate: op.rates.slice::<f32>()[0],
            eps: op.eps,
        },
    };
    in_blocks(&sums, elements);
}

impl ByBlock for UpdateSums<'_> {
    #[inline(always)]
    fn update<C: Codec>(&self, start: usize, ([updates, variances, ..], _): Buffers) {
        self.updates.read(start, updates, variances);
        set_block(self.grains, start, sum_of_squares(updates));
    }
}

struct WeightSums {
    grains: Shared<f64>,
    weights: WeightsAt,
}

pub(super) fn weight_squares(op: WeightSquares) {
    let elements = op.parameters.elements();
    let sums = WeightSums {
        grains: shared(op.squares),
        weights: weights_at(op.parameters, op.master),
    };
    in_blocks(&sums, elements);
}

impl ByBlock for WeightSums {
    #[inline(always)]
    fn update<C: Codec>(&self, start: usize, ([weights, ..], _): Buffers) {
        self.weights.read(start, weights);
        set_block(self.grains, start, sum_of_squares(weights));
    }
}

pub(super) fn adafactor_rate(op: AdafactorRate) {
    let grains = op.squares.slice::<f64>();
    let (updates, weights) = grains.split_at(grains.len() / 2);
    let rms = |grains: &[f64]| (sum_of_grains(grains) / op.elements as f64).sqrt();
    let size = rms(weights).max(f64::from(op.least_rms));
    let excess = (rms(updates) / f64::from(op.threshold)).max(1.0);
    let rate = f64::from(op.rates.slice::<f32>()[1]) * size / excess;
    op.out.slice_mut::<f32>()[0] = rate as f32;
}

struct WeightsStep<'a> {
    weights: WeightsAt,
    updates: Updates<'a>,
    random: Random,
    /// 1 - learning rate x weight decay.
    keep: f32,
    step_size: f32,
}

pub(super) fn adafactor_step(op: AdafactorStep) {
    let factor = op.clip.slice::<f32>()[1];
    if !factor.is_finite() {
        return;
    }
    let elements = op.parameters.elements();
    let rates = op.rates.slice::<f32>();
    let step = WeightsStep {
        weights: weights_at(op.parameters, op.master),
        updates: Updates {
            gradients: Values::of(op.gradients),
            variance: VarianceAt::of(op.variance),
            factor,
            rate: rates[0],
            eps: op.eps,
        },
        random: Random::new(op.key, op.first_index),
        keep: 1.0 - rates[2] * op.weight_decay,
        step_size: op.rate.slice::<f32>()[0],
    };
    in_blocks(&step, elements);
}

impl ByBlock for WeightsStep<'_> {
    #[inline(always)]
    fn update<C: Codec>(&self, start: usize, buffers: Buffers) {
        let ([updates, variances, weights, _], random) = buffers;
        self.updates.read(start, updates, variances);
        self.updates.variance.write(start, variances);
        self.weights.read(start, weights);
        for (weight, update) in weights.iter_mut().zip(updates) {
            *weight = *weight * self.keep - self.step_size * *update;
        }
        self.weights.write(start, weights, self.random, random);
    }
}
