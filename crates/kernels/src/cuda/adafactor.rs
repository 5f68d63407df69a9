//! Adafactor on ranges of a tensor.

use super::adamw::{beside, in_rounds};
use super::calls::Argument;
use super::extent::{Extent, WARP};
use super::{Cuda, Driver, Kernel, kernel, no_kernel};
use crate::operation::{
    AdafactorRate, AdafactorStep, FactorVariance, SQUARE_PARTS, UpdateSquares, VarianceOperand,
    VarianceScale, VarianceSums, WeightSquares,
};
use crate::{KernelError, MasterOperand};
use memory::DType;

/// Threads of a block that runs alone, as in `adafactor.cu`. They are the lanes of its sums, on the CPU too.
const BLOCK_THREADS: usize = 1024;

/// Columns and rows of the threads of a block that sums columns: as in `adafactor.cu`.
const COLUMN_THREADS: usize = 32;
const ROW_THREADS: usize = 32;

/// A number of blocks of [`BLOCK_THREADS`].
fn blocks(count: usize) -> Extent {
    Extent {
        grid: [count, 1, 1],
        block: [BLOCK_THREADS, 1, 1],
        shared_bytes: 0,
    }
}

pub(super) fn variance_scale<D: Driver>(
    cuda: &Cuda<D>,
    operation: VarianceScale,
) -> Result<(), KernelError> {
    let VarianceScale { out, grains, clip } = operation;
    let arguments = [
        (&out).into(),
        (&grains).into(),
        grains.elements().into(),
        (&clip).into(),
    ];
    cuda.launch(
        kernel!("adafactor", "variance_scale"),
        blocks(1),
        &arguments,
    )
}

pub(super) fn variance_sums<D: Driver>(
    cuda: &Cuda<D>,
    operation: VarianceSums,
) -> Result<(), KernelError> {
    let VarianceSums {
        sums,
        gradients,
        clip,
        scale,
        first,
        shape,
    } = operation;
    let (n, dtype) = (gradients.elements(), gradients.dtype());
    let (by_rows, by_columns) = sums.split_at(SQUARE_PARTS * shape.all_rows());
    let arguments = |sums: Argument, rows: usize| {
        [
            sums,
            (&gradients).into(),
            (&clip).into(),
            (&scale).into(),
            first.into(),
            n.into(),
            rows.into(),
            shape.columns.into(),
        ]
    };
    let rows = kernel!("adafactor", "variance_rows", dtype);
    let extent = Extent::lanes(shape.all_rows(), WARP);
    cuda.launch(
        rows,
        extent,
        &arguments((&by_rows).into(), shape.all_rows()),
    )?;
    let columns = kernel!("adafactor", "variance_columns", dtype);
    let extent = Extent {
        grid: [shape.matrices, shape.columns.div_ceil(COLUMN_THREADS), 1],
        block: [COLUMN_THREADS, ROW_THREADS, 1],
        shared_bytes: 0,
    };
    cuda.launch(
        columns,
        extent,
        &arguments((&by_columns).into(), shape.rows),
    )
}

pub(super) fn factor_variance<D: Driver>(
    cuda: &Cuda<D>,
    operation: FactorVariance,
) -> Result<(), KernelError> {
    let shape = operation.shape;
    let arguments = [
        (&operation.rows).into(),
        (&operation.columns).into(),
        (&operation.factors).into(),
        (&operation.sums).into(),
        operation.sums.dims()[0].into(),
        (&operation.scale).into(),
        (&operation.rates).into(),
        (&operation.clip).into(),
        operation.eps.into(),
        shape.rows.into(),
        shape.columns.into(),
    ];
    let kernel = kernel!("adafactor", "factor_variance");
    cuda.launch(kernel, blocks(shape.matrices), &arguments)
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
        } => vec![
            factors.into(),
            columns.into(),
            (*first).into(),
            shape.rows.into(),
            shape.columns.into(),
        ],
    }
}

pub(super) fn update_squares<D: Driver>(
    cuda: &Cuda<D>,
    operation: UpdateSquares,
) -> Result<(), KernelError> {
    let gradients = operation.gradients.dtype();
    let n = operation.gradients.elements();
    let kernel = match &operation.variance {
        VarianceOperand::Factors { .. } => {
            kernel!("adafactor", "update_squares_factors", gradients)
        }
        VarianceOperand::Elements(_) => kernel!("adafactor", "update_squares_elements", gradients),
    };
    let mut arguments = vec![(&operation.squares).into(), (&operation.gradients).into()];
    arguments.extend(variance(&operation.variance));
    arguments.extend::<[Argument; 4]>([
        (&operation.rates).into(),
        (&operation.clip).into(),
        operation.eps.into(),
        n.into(),
    ]);
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn weight_squares<D: Driver>(
    cuda: &Cuda<D>,
    operation: WeightSquares,
) -> Result<(), KernelError> {
    let n = operation.parameters.elements();
    let name = match (operation.parameters.dtype(), &operation.master) {
        (DType::F32, _) => "weight_squares_f32",
        (_, MasterOperand::F32(_)) => "weight_squares_master",
        (_, MasterOperand::Remainder(_)) => "weight_squares_split",
        (_, MasterOperand::Parameters) => "weight_squares_rounded",
    };
    let arguments = [
        (&operation.squares).into(),
        (&operation.parameters).into(),
        beside(&operation.master),
        n.into(),
    ];
    cuda.launch(kernel!("adafactor", name), Extent::flat(n), &arguments)
}

pub(super) fn adafactor_rate<D: Driver>(
    cuda: &Cuda<D>,
    operation: AdafactorRate,
) -> Result<(), KernelError> {
    let arguments = [
        (&operation.out).into(),
        (&operation.squares).into(),
        operation.squares.dims()[1].into(),
        (&operation.rates).into(),
        operation.elements.into(),
        operation.least_rms.into(),
        operation.threshold.into(),
    ];
    cuda.launch(
        kernel!("adafactor", "adafactor_rate"),
        blocks(1),
        &arguments,
    )
}

/// The kernel for the form of weights, by its name for each.
macro_rules! by_weights {
    ($step:expr, $f32:literal, $master:literal, $split:literal, $rounded:literal) => {{
        let gradients = $step.gradients.dtype();
        match ($step.parameters.dtype(), &$step.master) {
            (DType::F32, _) => kernel!("adafactor", $f32, gradients),
            (_, MasterOperand::F32(_)) => kernel!("adafactor", $master, gradients),
            (_, MasterOperand::Remainder(_)) => kernel!("adafactor", $split, gradients),
            (_, MasterOperand::Parameters) => kernel!("adafactor", $rounded, gradients),
        }
    }};
}

fn kernel_of(step: &AdafactorStep) -> Kernel {
    match &step.variance {
        VarianceOperand::Factors { .. } => by_weights!(
            step,
            "adafactor_factors_f32",
            "adafactor_factors_master",
            "adafactor_factors_split",
            "adafactor_factors_rounded"
        ),
        VarianceOperand::Elements(_) => by_weights!(
            step,
            "adafactor_elements_f32",
            "adafactor_elements_master",
            "adafactor_elements_split",
            "adafactor_elements_rounded"
        ),
    }
}

pub(super) fn adafactor_step<D: Driver>(
    cuda: &Cuda<D>,
    step: AdafactorStep,
) -> Result<(), KernelError> {
    let n = step.parameters.elements();
    let mut arguments = vec![(&step.parameters).into(), beside(&step.master)];
    arguments.extend(variance(&step.variance));
    arguments.extend::<[Argument; 9]>([
        (&step.gradients).into(),
        (&step.rate).into(),
        (&step.rates).into(),
        (&step.clip).into(),
        (&step.key).into(),
        (step.first_index as usize).into(),
        step.weight_decay.into(),
        step.eps.into(),
        n.into(),
    ]);
    cuda.launch(kernel_of(&step), in_rounds(n), &arguments)
}
