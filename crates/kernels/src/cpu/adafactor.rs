//! Adafactor on ranges of a tensor.

use super::Shared;
use super::dispatch::by_dtype;
use super::norm::{sum_of_grains, sum_of_groups};
use super::quantise::Codec;
use super::simd::{Real, vectorized};
use super::states::{ByBlock, Random, Values, WeightsAt, in_blocks, part, weights_at};
use crate::operation::{
    AdafactorRate, AdafactorStep, FactorVariance, MatricesShape, SQUARE_PARTS, UpdateGrains,
    VarianceOperand, VarianceScale, VarianceSums, WeightGrains,
};
use crate::quantise::BLOCK;
use memory::Out;
use rayon::prelude::*;
use std::ops::Range;

/// Neighbours that a thread of a CUDA kernel loads at once, which gives the order of sums.
const PACK: usize = 8;

/// Rows that one task sums.
const BAND: usize = 64;

/// Lanes of the sum of a row: whole numbers, so their number does not show.
const LANES: usize = 8;

pub(super) fn variance_scale(operation: VarianceScale) {
    let factor = operation.clip.slice::<f32>()[1];
    let grains = operation.grains.slice::<f64>();
    let largest = grains.iter().copied().fold(0.0, f64::max);
    let bound = largest.sqrt() * f64::from(factor);
    operation.out.slice_mut::<f64>()[0] = above(bound);
}

/// The next power of two above a number; 1 for what is 0 or not finite.
fn above(bound: f64) -> f64 {
    let exponent = bound.to_bits() >> 52 & 0x7ff;
    match exponent {
        0 | 0x7ff => 1.0,
        _ => f64::from_bits((exponent + 1).min(0x7fe) << 52),
    }
}

pub(super) fn variance_sums(operation: VarianceSums) {
    by_dtype!(operation.gradients.dtype(), variance_sums_of(operation));
}

/// What the sums of a band of rows go by.
struct Scaled {
    factor: f32,
    inverse: f64,
}

fn variance_sums_of<T: Real>(operation: VarianceSums) {
    let VarianceSums {
        sums,
        gradients,
        clip,
        scale,
        first,
        shape,
    } = operation;
    let gradients = gradients.slice::<T>();
    let scaled = Scaled {
        factor: clip.slice::<f32>()[1],
        inverse: 1.0 / scale.slice::<f64>()[0],
    };
    let all_rows = shape.all_rows();
    let (by_rows, by_columns) = sums
        .slice_mut::<f64>()
        .split_at_mut(SQUARE_PARTS * all_rows);
    by_columns.fill(0.0);
    let (one, rest) = by_rows.split_at_mut(all_rows);
    let (other, last) = rest.split_at_mut(all_rows);
    let rows = one.par_chunks_mut(BAND).zip(other.par_chunks_mut(BAND));
    let bands = rows.zip(last.par_chunks_mut(BAND)).enumerate();
    // Whole numbers have the same sum in any order.
    let columns = bands.fold(
        || vec![0.0; by_columns.len()],
        |mut columns, (band, ((one, other), last))| {
            for (row, parts) in one.iter_mut().zip(other).zip(last).enumerate() {
                let ((one, other), last) = parts;
                let row = band * BAND + row;
                [*one, *other, *last] =
                    sum_row(gradients, first, row, &shape, &scaled, &mut columns);
            }
            columns
        },
    );
    let columns = columns.reduce_with(|mut all, other| {
        all.iter_mut()
            .zip(other)
            .for_each(|(sum, term)| *sum += term);
        all
    });
    if let Some(columns) = columns {
        by_columns.copy_from_slice(&columns);
    }
}

/// Adds the squares of what a range has of a row to its columns, and returns their sums.
fn sum_row<T: Real>(
    gradients: &[T],
    first: usize,
    row: usize,
    shape: &MatricesShape,
    scaled: &Scaled,
    columns: &mut [f64],
) -> [f64; SQUARE_PARTS] {
    let start = row * shape.columns;
    let own = clamped(start..start + shape.columns, first..first + gradients.len());
    if own.is_empty() {
        return [0.0; SQUARE_PARTS];
    }
    let column = row / shape.rows * shape.columns + own.start - start;
    let columns_of = |part: usize| {
        let first = part * shape.all_columns() + column;
        first..first + own.len()
    };
    let [one, other, last] = [0, 1, 2].map(columns_of);
    let Ok([one, other, last]) = columns.get_disjoint_mut([one, other, last]) else {
        unreachable!("the parts lie one behind the other")
    };
    let gradients = &gradients[own.start - first..own.end - first];
    add_squares(gradients, scaled, one, other, last)
}

/// What two ranges share, which is empty if it ends before it starts.
fn clamped(one: Range<usize>, other: Range<usize>) -> Range<usize> {
    one.start.max(other.start)..one.end.min(other.end)
}

vectorized! {
    /// Adds squares to one column each, and returns their sum.
    fn add_squares<T: Real>(
        gradients: &[T],
        scaled: &Scaled,
        one: &mut [f64],
        other: &mut [f64],
        last: &mut [f64],
    ) -> [f64; SQUARE_PARTS] {
        let mut lanes = [[0.0; LANES]; SQUARE_PARTS];
        let (gradients, rest) = gradients.as_chunks::<LANES>();
        let (one, one_rest) = one.as_chunks_mut::<LANES>();
        let (other, other_rest) = other.as_chunks_mut::<LANES>();
        let (last, last_rest) = last.as_chunks_mut::<LANES>();
        let columns = one.iter_mut().zip(other).zip(last);
        for (gradients, ((one, other), last)) in gradients.iter().zip(columns) {
            add_run(gradients, scaled, [one, other, last], &mut lanes);
        }
        add_run(rest, scaled, [one_rest, other_rest, last_rest], &mut lanes);
        lanes.map(|lanes| lanes.iter().sum())
    }
}

/// Adds neighbouring squares to their columns, and to a lane each.
#[inline(always)]
fn add_run<T: Real>(
    gradients: &[T],
    scaled: &Scaled,
    [one, other, last]: [&mut [f64]; SQUARE_PARTS],
    lanes: &mut [[f64; LANES]; SQUARE_PARTS],
) {
    for (lane, gradient) in gradients.iter().enumerate() {
        let parts = square(*gradient, scaled);
        one[lane] += parts[0];
        other[lane] += parts[1];
        last[lane] += parts[2];
        for (lanes, part) in lanes.iter_mut().zip(parts) {
            lanes[lane] += part;
        }
    }
}

/// The square of a clipped gradient, in units of the scale's: in whole numbers, and what is below the last is left out.
#[inline(always)]
fn square<T: Real>(gradient: T, scaled: &Scaled) -> [f64; SQUARE_PARTS] {
    const PART: f64 = (1u64 << 26) as f64;
    // Adding and subtracting this rounds to the nearest whole number.
    const ROUND: f64 = 1.5 * (1u64 << 52) as f64;
    let clipped = gradient.widen() * scaled.factor;
    let x = f64::from(clipped) * scaled.inverse;
    let mut rest = x * x;
    let mut parts = [0.0; SQUARE_PARTS];
    for part in &mut parts {
        rest *= PART;
        *part = (rest + ROUND) - ROUND;
        rest -= *part;
    }
    parts
}

pub(super) fn factor_variance(operation: FactorVariance) {
    let FactorVariance {
        rows,
        columns,
        factors,
        sums,
        scale,
        rates,
        clip,
        eps,
        shape,
    } = operation;
    if !clip.slice::<f32>()[1].is_finite() {
        return factors.slice_mut::<f32>().fill(0.0);
    }
    let sums = sums.slice::<f64>();
    let scale = scale.slice::<f64>()[0];
    let rate = rates.slice::<f32>()[0];
    let (rows, columns) = (rows.slice_mut::<f32>(), columns.slice_mut::<f32>());
    let step = |state: &mut [f32], first: usize, terms: usize| {
        let count = state.len();
        for (index, value) in state.iter_mut().enumerate() {
            let of_part = |part: usize| {
                let at = first + part * count + index;
                let all = sums.iter().skip(at).step_by(shape.sums());
                all.sum::<f64>()
            };
            let mean = mean_of([0, 1, 2].map(of_part), scale, terms);
            *value += rate * (mean - *value);
        }
    };
    let of_rows = SQUARE_PARTS * shape.all_rows();
    step(rows, 0, shape.columns);
    step(columns, of_rows, shape.rows);
    let factors = factors.slice_mut::<f32>().chunks_mut(shape.rows);
    for (rows, factors) in rows.chunks(shape.rows).zip(factors) {
        let mean = (sum_in_lanes(rows) / shape.rows as f64) as f32;
        let divisor = mean.max(eps);
        for (factor, row) in factors.iter_mut().zip(rows) {
            *factor = row / divisor;
        }
    }
}

/// The mean of so many squares whose sum is in whole numbers.
fn mean_of([one, other, last]: [f64; SQUARE_PARTS], scale: f64, terms: usize) -> f32 {
    const SMALLER: f64 = 1.0 / (1u64 << 26) as f64;
    let sum = ((last * SMALLER + other) * SMALLER + one) * SMALLER;
    (sum * scale * scale / terms as f64) as f32
}

/// The order of the sum of CUDA's block of 1024 threads.
fn sum_in_lanes(values: &[f32]) -> f64 {
    let widened: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
    sum_of_grains(&widened)
}

/// A range's variance, as tasks share it.
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
            VarianceOperand::Elements(out) => {
                VarianceAt::Elements(Shared(out.slice_mut::<f32>().as_mut_ptr()))
            }
        }
    }

    /// The variances of some elements, of which these are the clipped gradients, after the step.
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

    /// Keeps the variances that were read.
    #[inline(always)]
    fn write(&self, start: usize, variances: &[f32]) {
        if let VarianceAt::Elements(state) = self {
            // SAFETY: as in `read`.
            let state = unsafe { part(*state, start, variances.len()) };
            state.copy_from_slice(variances);
        }
    }
}

/// The updates of a range, as tasks share what they are made of.
struct Updates<'a> {
    gradients: Values<'a>,
    variance: VarianceAt<'a>,
    factor: f32,
    rate: f32,
    eps: f32,
}

/// Three blocks in f32, and random numbers for one.
pub(super) struct Room {
    updates: [f32; BLOCK],
    variances: [f32; BLOCK],
    weights: [f32; BLOCK],
    random: [u32; BLOCK],
}

impl Default for Room {
    fn default() -> Room {
        Room {
            updates: [0.0; BLOCK],
            variances: [0.0; BLOCK],
            weights: [0.0; BLOCK],
            random: [0; BLOCK],
        }
    }
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

/// The sum of a block's squares, in the order of CUDA's warp.
#[inline(always)]
fn sum_of_squares(values: &[f32]) -> f64 {
    let mut squares = [0.0; BLOCK];
    for (square, value) in squares.iter_mut().zip(values) {
        *square = f64::from(*value) * f64::from(*value);
    }
    sum_of_groups::<PACK>(&squares)
}

fn grains_at(grains: Out) -> Shared<f64> {
    Shared(grains.slice_mut::<f64>().as_mut_ptr())
}

/// Writes the grain of a block.
#[inline(always)]
fn set_grain(grains: Shared<f64>, start: usize, sum: f64) {
    // SAFETY: the block is this task's, and its grain is in the tensor, as its check has seen.
    let grain = unsafe { part(grains, start / BLOCK, 1) };
    grain[0] = sum;
}

struct UpdateSums<'a> {
    grains: Shared<f64>,
    updates: Updates<'a>,
}

pub(super) fn update_grains(operation: UpdateGrains) {
    let elements = operation.gradients.elements();
    let sums = UpdateSums {
        grains: grains_at(operation.grains),
        updates: Updates {
            gradients: Values::of(operation.gradients),
            variance: VarianceAt::of(operation.variance),
            factor: operation.clip.slice::<f32>()[1],
            rate: operation.rates.slice::<f32>()[0],
            eps: operation.eps,
        },
    };
    in_blocks(&sums, elements);
}

impl ByBlock for UpdateSums<'_> {
    type Room = Room;

    #[inline(always)]
    fn update<C: Codec>(&self, start: usize, elements: usize, room: &mut Room) {
        let updates = &mut room.updates[..elements];
        self.updates
            .read(start, updates, &mut room.variances[..elements]);
        set_grain(self.grains, start, sum_of_squares(updates));
    }
}

struct WeightSums {
    grains: Shared<f64>,
    weights: WeightsAt,
}

pub(super) fn weight_grains(operation: WeightGrains) {
    let elements = operation.parameters.elements();
    let sums = WeightSums {
        grains: grains_at(operation.grains),
        weights: weights_at(operation.parameters, operation.master),
    };
    in_blocks(&sums, elements);
}

impl ByBlock for WeightSums {
    type Room = Room;

    #[inline(always)]
    fn update<C: Codec>(&self, start: usize, elements: usize, room: &mut Room) {
        let weights = &mut room.weights[..elements];
        self.weights.read(start, weights);
        set_grain(self.grains, start, sum_of_squares(weights));
    }
}

pub(super) fn adafactor_rate(operation: AdafactorRate) {
    let grains = operation.grains.slice::<f64>();
    let (updates, weights) = grains.split_at(grains.len() / 2);
    let rms = |grains: &[f64]| (sum_of_grains(grains) / operation.elements as f64).sqrt();
    let size = rms(weights).max(f64::from(operation.least_rms));
    let excess = (rms(updates) / f64::from(operation.threshold)).max(1.0);
    let rate = f64::from(operation.rates.slice::<f32>()[1]) * size / excess;
    operation.out.slice_mut::<f32>()[0] = rate as f32;
}

struct WeightsStep<'a> {
    weights: WeightsAt,
    updates: Updates<'a>,
    random: Random,
    /// 1 - learning rate x weight decay.
    keep: f32,
    step_size: f32,
}

pub(super) fn adafactor_step(operation: AdafactorStep) {
    let factor = operation.clip.slice::<f32>()[1];
    if !factor.is_finite() {
        return;
    }
    let elements = operation.parameters.elements();
    let rates = operation.rates.slice::<f32>();
    let step = WeightsStep {
        weights: weights_at(operation.parameters, operation.master),
        updates: Updates {
            gradients: Values::of(operation.gradients),
            variance: VarianceAt::of(operation.variance),
            factor,
            rate: rates[0],
            eps: operation.eps,
        },
        random: Random::new(operation.key, operation.first_index),
        keep: 1.0 - rates[2] * operation.weight_decay,
        step_size: operation.rate.slice::<f32>()[0],
    };
    in_blocks(&step, elements);
}

impl ByBlock for WeightsStep<'_> {
    type Room = Room;

    #[inline(always)]
    fn update<C: Codec>(&self, start: usize, elements: usize, room: &mut Room) {
        let updates = &mut room.updates[..elements];
        let variances = &mut room.variances[..elements];
        let weights = &mut room.weights[..elements];
        self.updates.read(start, updates, variances);
        self.updates.variance.write(start, variances);
        self.weights.read(start, weights);
        for (weight, update) in weights.iter_mut().zip(updates) {
            *weight = *weight * self.keep - self.step_size * *update;
        }
        let random = &mut room.random[..elements];
        self.weights.write(start, weights, self.random, random);
    }
}
