//! Adafactor on ranges of a tensor.

use super::adamw::{beside, by_weights, in_rounds};
use super::extent::{Extent, WARP};
use super::{Argument, Cuda, Driver, arguments, kernel};
use crate::operation::{
    AdafactorRate, AdafactorStep, FactorVariance, SQUARE_PARTS, UpdateSquares, VarianceOperand,
    VarianceScale, VarianceSums, WeightSquares,
};
use crate::{MasterOperand, Result};
use memory::{DType, Out};

/// Threads of a block that runs alone, as in `adafactor.cu`. They are the lanes of its sums, on the CPU too.
const BLOCK_THREADS: usize = 1024;

/// Columns and rows of the threads of a block that sums columns: as in `adafactor.cu`.
const COLUMN_THREADS: usize = 16;
const ROW_THREADS: usize = 64;

/// A number of blocks of [`BLOCK_THREADS`].
fn blocks(count: usize) -> Extent {
    Extent::new([count, 1, 1], [BLOCK_THREADS, 1, 1])
}

pub(super) fn variance_scale<D: Driver>(cuda: &Cuda<D>, op: VarianceScale) -> Result {
    let arguments = arguments![&op.out, &op.grains, op.grains.elements(), &op.clip];
    let kernel = kernel!("adafactor", "variance_scale");
    cuda.launch(kernel, blocks(1), &arguments)
}

pub(super) fn variance_sums<D: Driver>(cuda: &Cuda<D>, op: VarianceSums) -> Result {
    let (n, dtype, shape) = (op.gradients.elements(), op.gradients.dtype(), op.shape);
    let (by_rows, by_columns) = op.sums.split_at(SQUARE_PARTS * shape.all_rows());
    let arguments = |sums: &Out, rows: usize| {
        arguments! { sums, &op.gradients, &op.clip, &op.scale, op.first, n, rows, shape.columns }
    };
    let rows = kernel!("adafactor", "variance_rows", dtype);
    let extent = Extent::lanes(shape.all_rows(), WARP);
    cuda.launch(rows, extent, &arguments(&by_rows, shape.all_rows()))?;
    let columns = kernel!("adafactor", "variance_columns", dtype);
    let grid = [shape.matrices, shape.columns.div_ceil(COLUMN_THREADS), 1];
    let extent = Extent::new(grid, [COLUMN_THREADS, ROW_THREADS, 1]);
    cuda.launch(columns, extent, &arguments(&by_columns, shape.rows))
}

pub(super) fn factor_variance<D: Driver>(cuda: &Cuda<D>, op: FactorVariance) -> Result {
    let arguments = arguments! {
        &op.rows, &op.columns, &op.factors, &op.sums, op.sums.dims()[0], &op.scale, &op.rates,
        &op.clip, op.eps, op.shape.rows, op.shape.columns,
    };
    let kernel = kernel!("adafactor", "factor_variance");
    cuda.launch(kernel, blocks(op.shape.matrices), &arguments)
}

/// A variance as kernels of factors take it, or those of an element each.
fn variance(variance: &VarianceOperand) -> Vec<Argument> {
    match variance {
        VarianceOperand::Elements(state) => vec![state.into()],
        VarianceOperand::Factors {
            factors,
            columns,
            first,
            shape,
        } => arguments![factors, columns, *first, shape.rows, shape.columns].to_vec(),
    }
}

pub(super) fn update_squares<D: Driver>(cuda: &Cuda<D>, op: UpdateSquares) -> Result {
    let gradients = op.gradients.dtype();
    let n = op.gradients.elements();
    let kernel = match &op.variance {
        VarianceOperand::Factors { .. } => {
            kernel!("adafactor", "update_squares_factors", gradients)
        }
        VarianceOperand::Elements(_) => kernel!("adafactor", "update_squares_elements", gradients),
    };
    let first = arguments![&op.squares, &op.gradients];
    let last = arguments![&op.rates, &op.clip, op.eps, n];
    let arguments = [&first[..], &variance(&op.variance), &last].concat();
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn weight_squares<D: Driver>(cuda: &Cuda<D>, op: WeightSquares) -> Result {
    let n = op.parameters.elements();
    let arguments = arguments![&op.squares, &op.parameters, beside(&op.master), n];
    let kernel = by_weights!(op, "adafactor", "weight_squares_");
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn adafactor_rate<D: Driver>(cuda: &Cuda<D>, op: AdafactorRate) -> Result {
    let rows = op.squares.dims()[1];
    let arguments = arguments! {
        &op.out, &op.squares, rows, &op.rates, op.elements, op.least_rms, op.threshold,
    };
    let kernel = kernel!("adafactor", "adafactor_rate");
    cuda.launch(kernel, blocks(1), &arguments)
}

pub(super) fn adafactor_step<D: Driver>(cuda: &Cuda<D>, op: AdafactorStep) -> Result {
    let (n, gradients) = (op.parameters.elements(), op.gradients.dtype());
    let kernel = match &op.variance {
        VarianceOperand::Factors { .. } => {
            by_weights!(op, "adafactor", "adafactor_factors_", gradients)
        }
        VarianceOperand::Elements(_) => {
            by_weights!(op, "adafactor", "adafactor_elements_", gradients)
        }
    };
    let first = arguments![&op.parameters, beside(&op.master)];
    let last = arguments! {
        &op.gradients, &op.rate, &op.rates, &op.clip, &op.key, op.first_index as usize,
        op.weight_decay, op.eps, n,
    };
    let arguments = [&first[..], &variance(&op.variance), &last].concat();
    cuda.launch(kernel, in_rounds(n), &arguments)
}
