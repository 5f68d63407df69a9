//! Adafactor (Shazeer and Stern 2018) on ranges of a tensor. Sums over the whole tensor have the same bits for any
//! division into ranges. Squares by rows and columns are whole numbers, whose sums are exact in any order. Other sums
//! of squares are by blocks of [`BLOCK`] elements.
//!
//! A tensor is `m` matrices of `r` rows and `c` columns each. Its elements are counted from 0, and every range begins
//! at a multiple of [`BLOCK`].

use super::adamw::MasterOperand;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::{Field, Visit, operation};
use super::operand::{Operand, OperandRule, reads};
use crate::quantise::BLOCK;
use memory::{In, Out};

/// Most squares whose sum is exact: each part is at most 2^26, and f64 has all whole numbers up to 2^53.
pub const SQUARES_MAX: usize = 1 << 27;

/// Whole numbers that hold a square: its multiples of 2^-26, the rest in multiples of 2^-52, and the rest of that in
/// 2^-78.
pub const SQUARE_PARTS: usize = 3;

/// The shape of a tensor whose variance is kept by rows and columns: the number of matrices, and the rows and columns
/// of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatricesShape {
    pub matrices: usize,
    pub rows: usize,
    pub columns: usize,
}

impl MatricesShape {
    /// Rows of all matrices.
    pub fn all_rows(&self) -> usize {
        self.matrices * self.rows
    }

    /// Columns of all matrices.
    pub fn all_columns(&self) -> usize {
        self.matrices * self.columns
    }

    /// Elements of all matrices.
    pub fn elements(&self) -> usize {
        self.all_rows() * self.columns
    }

    /// Elements of [`VarianceSums::sums`].
    pub fn sums(&self) -> usize {
        SQUARE_PARTS * (self.all_rows() + self.all_columns())
    }

    fn check(&self, check: &Check) -> Checked {
        let longest = self.rows.max(self.columns);
        check.that(self.elements() > 0 && longest <= SQUARES_MAX, || {
            format!("{self:?} is empty, or has rows or columns of more than {SQUARES_MAX} elements")
        })
    }

    fn sizes(&self) -> Vec<usize> {
        vec![self.matrices, self.rows, self.columns]
    }
}

/// The variance by whose root a gradient is divided.
pub enum VarianceOperand<'a> {
    /// For element (i, j) of a matrix, `factors[i] columns[j]`, of a range that begins at the tensor's element `first`.
    Factors {
        /// `[m r]` f32, from [`FactorVariance`].
        factors: In<'a>,
        /// `[m c]` f32: the state.
        columns: In<'a>,
        first: usize,
        shape: MatricesShape,
    },
    /// `[n]` f32: the state before the step; [`AdafactorStep`] writes that after it.
    Elements(Out<'a>),
}

operation! {
    /// `out [1] (f64)` = a power of two that no clipped gradient of a tensor is above, if they are finite: from `grains [g]`
    /// (f64, see [`super::NormGrains`]), which hold the squares of them all.
    VarianceScale "variance_scale": grains [g] {
        out: Out<'a> [1] f64 uncounted,
        grains: In<'a> [g] f64,
        /// As in [`super::AdamW`].
        clip: In<'a> [2] f32 uncounted,
    }

    /// `sums [SQUARE_PARTS (m r + m c)] (f64)` = the squares of a range's clipped gradients, added up by rows, then by columns; in
    /// units of `scale [1]` (f64) squared, and in [`SQUARE_PARTS`] whole numbers each: those of all rows, then those of all
    /// columns. Zero where the range has nothing of a row or a column.
    VarianceSums "variance_sums": gradients [n] {
        sums: Out<'a> [shape.sums()] f64,
        /// Before clipping.
        gradients: In<'a> [n] real,
        /// As in [`super::AdamW`].
        clip: In<'a> [2] f32 uncounted,
        scale: In<'a> [1] f64 uncounted,
        /// The index in the tensor of the range's first element.
        first: usize,
        shape: MatricesShape,
    }

    /// The step of a factored variance: `rows [m r]` and `columns [m c]` (f32) move by `rates[0]` towards the means of squares
    /// that `sums [k, SQUARE_PARTS (m r + m c)]` (f64, see [`VarianceSums`]) add up to; `factors [m r]` (f32) = the rows divided
    /// by their mean, which is at least `eps`. If the clipping factor is not finite, rows and columns stay as they are.
    FactorVariance "factor_variance": rows, sums [k, _] {
        rows: Out<'a> [shape.all_rows()] f32 changes,
        columns: Out<'a> [shape.all_columns()] f32 changes,
        factors: Out<'a> [shape.all_rows()] f32,
        sums: In<'a> [k, shape.sums()] f64,
        /// From [`VarianceScale`].
        scale: In<'a> [1] f64 uncounted,
        /// How far variances move, the largest step, the learning rate.
        rates: In<'a> [3] f32 uncounted,
        /// As in [`super::AdamW`].
        clip: In<'a> [2] f32 uncounted,
        eps: f32,
        shape: MatricesShape,
    }

    /// `squares [ceil(n / BLOCK)] (f64)` = the sums of squares of a range's updates: clipped gradients divided by the roots of
    /// their variances, which are at least `eps` each.
    UpdateSquares "update_squares": gradients [n] {
        squares: Out<'a> [n.div_ceil(BLOCK)] f64,
        /// Before clipping.
        gradients: In<'a> [n] real,
        variance: VarianceOperand<'a> [n] f32 reads,
        /// As in [`FactorVariance`].
        rates: In<'a> [3] f32 uncounted,
        /// As in [`super::AdamW`].
        clip: In<'a> [2] f32 uncounted,
        eps: f32,
    }

    /// `squares [ceil(n / BLOCK)] (f64)` = the sums of squares of a range's exact weights.
    WeightSquares "weight_squares": parameters [n] {
        squares: Out<'a> [n.div_ceil(BLOCK)] f64,
        /// Read.
        parameters: Out<'a> [n] real uncounted,
        /// Read.
        master: MasterOperand<'a> [n] f32 reads,
    }

    /// `out [1] (f32)` = the step of a tensor's weights along its updates: `rates[1]` times the root mean square of its weights,
    /// which is at least `least_rms`; divided by that of its updates in units of `threshold`, if it is above 1. `squares [2, g]`
    /// (f64) are those of updates, then of weights.
    AdafactorRate "adafactor_rate": squares {
        out: Out<'a> [1] f32 uncounted,
        squares: In<'a> [2, elements.div_ceil(BLOCK)] f64,
        /// As in [`FactorVariance`].
        rates: In<'a> [3] f32 uncounted,
        /// Elements of the tensor.
        elements: usize,
        least_rms: f32,
        threshold: f32,
    }

    /// The step of a range's weights: they lose `rates[2]` x `weight_decay` of themselves, then `rate [1]` (f32) x their updates
    /// (see [`UpdateSquares`]). If the clipping factor is not finite, nothing is changed.
    AdafactorStep "adafactor_step": parameters [n] {
        /// The weights; written.
        parameters: Out<'a> [n] real used(master.access()),
        /// The exact weights; read and written.
        master: MasterOperand<'a> [n] f32 changes,
        /// Before clipping.
        gradients: In<'a> [n] real,
        /// Written if it has one element per gradient.
        variance: VarianceOperand<'a> [n] f32 changes,
        rate: In<'a> [1] f32 uncounted,
        /// As in [`FactorVariance`].
        rates: In<'a> [3] f32 uncounted,
        /// As in [`super::AdamW`].
        clip: In<'a> [2] f32 uncounted,
        /// As in [`super::AdamW`].
        key: In<'a> [2] u32 uncounted,
        /// As in [`super::AdamW`].
        first_index: u64,
        eps: f32,
        weight_decay: f32,
    }
}

fn check_within(check: &Check, shape: &MatricesShape, first: usize, n: usize) -> Checked {
    shape.check(check)?;
    check.first("first", first as u64)?;
    check.that(first + n <= shape.elements(), || {
        format!("elements {first} to {} of {shape:?}", first + n)
    })
}

impl VarianceOperand<'_> {
    fn check(&self, check: &Check, n: usize) -> Checked {
        match self {
            VarianceOperand::Factors { shape, first, .. } => check_within(check, shape, *first, n),
            VarianceOperand::Elements(_) => Ok(()),
        }
    }
}

impl Field for VarianceOperand<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        match self {
            VarianceOperand::Elements(variance) => variance.visit(rule, visit),
            VarianceOperand::Factors {
                factors,
                columns,
                shape,
                ..
            } => {
                let rule = rule.reads();
                let [of_rows, of_columns] = [shape.all_rows(), shape.all_columns()];
                factors.visit(rule.named("factors").shaped([of_rows]), &mut *visit)?;
                columns.visit(rule.named("columns").shaped([of_columns]), visit)
            }
        }
    }
}

impl Contract for VarianceScale<'_> {}

impl Contract for VarianceSums<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check_within(check, &self.shape, self.first, self.gradients.elements())
    }

    /// Gradients are read twice, by rows and by columns.
    fn operands(&self) -> Vec<Operand<'_>> {
        let mut operands = self.declared_operands();
        operands.push(reads(self.gradients));
        operands
    }

    fn sizes(&self) -> Vec<usize> {
        let mut sizes = self.shape.sizes();
        sizes.push(self.gradients.elements());
        sizes
    }
}

impl Contract for FactorVariance<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        self.shape.check(check)
    }

    fn sizes(&self) -> Vec<usize> {
        let mut sizes = self.shape.sizes();
        sizes.push(self.sums.dims()[0]);
        sizes
    }
}

impl Contract for UpdateSquares<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        self.variance.check(check, self.gradients.elements())
    }
}

impl Contract for WeightSquares<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        self.master.check(check, self.parameters.dtype())
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let is_copy = matches!(self.master, MasterOperand::F32(_));
        let mut operands = self.declared_operands();
        operands.extend((!is_copy).then(|| reads(self.parameters.as_in())));
        operands
    }
}

impl Contract for AdafactorRate<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.that(self.elements > 0, || "the tensor has no element".into())
    }
}

impl Contract for AdafactorStep<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        self.master.check(check, self.parameters.dtype())?;
        self.variance.check(check, self.gradients.elements())?;
        check.first("first_index", self.first_index)
    }
}
