//! Adafactor (Shazeer and Stern 2018) on ranges of a tensor. Sums over the whole tensor have the same bits for any
//! division into ranges. Squares by rows and columns are whole numbers, whose sums are exact in any order. Other sums
//! of squares are by blocks of [`BLOCK`] elements.
//!
//! A tensor is `m` matrices of `r` rows and `c` columns each. Its elements are counted from 0, and every range begins
//! at a multiple of [`BLOCK`].

use super::adamw::MasterOperand;
use super::check::{Check, Checked};
use super::contract::{Contract, Operand, changes, reads, writes};
use crate::quantise::BLOCK;
use memory::{DType, In, Out};

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

/// `out [1] (f64)` = a power of two that no clipped gradient of a tensor is above, if they are finite: from `grains [g]`
/// (f64, see [`super::NormGrains`]), which hold the squares of them all.
pub struct VarianceScale<'a> {
    pub out: Out<'a>,
    pub grains: In<'a>,
    /// `[2]` f32, as in [`super::AdamW`].
    pub clip: In<'a>,
}

/// `sums [SQUARE_PARTS (m r + m c)] (f64)` = the squares of a range's clipped gradients, added up by rows, then by columns; in
/// units of `scale [1]` (f64) squared, and in [`SQUARE_PARTS`] whole numbers each: those of all rows, then those of all
/// columns. Zero where the range has nothing of a row or a column.
pub struct VarianceSums<'a> {
    pub sums: Out<'a>,
    /// `[n]` f32 or bf16, before clipping.
    pub gradients: In<'a>,
    /// `[2]` f32, as in [`super::AdamW`].
    pub clip: In<'a>,
    pub scale: In<'a>,
    /// The index in the tensor of the range's first element.
    pub first: usize,
    pub shape: MatricesShape,
}

/// The step of a factored variance: `rows [m r]` and `columns [m c]` (f32) move by `rates[0]` towards the means of squares
/// that `sums [k, SQUARE_PARTS (m r + m c)]` (f64, see [`VarianceSums`]) add up to; `factors [m r]` (f32) = the rows divided
/// by their mean, which is at least `eps`. If the clipping factor is not finite, rows and columns stay as they are.
pub struct FactorVariance<'a> {
    pub rows: Out<'a>,
    pub columns: Out<'a>,
    pub factors: Out<'a>,
    pub sums: In<'a>,
    /// `[1]` f64, from [`VarianceScale`].
    pub scale: In<'a>,
    /// `[3]` f32: how far variances move, the largest step, the learning rate.
    pub rates: In<'a>,
    /// `[2]` f32, as in [`super::AdamW`].
    pub clip: In<'a>,
    pub eps: f32,
    pub shape: MatricesShape,
}

/// `squares [ceil(n / BLOCK)] (f64)` = the sums of squares of a range's updates: clipped gradients divided by the roots of
/// their variances, which are at least `eps` each.
pub struct UpdateSquares<'a> {
    pub squares: Out<'a>,
    /// `[n]` f32 or bf16, before clipping.
    pub gradients: In<'a>,
    pub variance: VarianceOperand<'a>,
    /// As in [`FactorVariance`].
    pub rates: In<'a>,
    /// `[2]` f32, as in [`super::AdamW`].
    pub clip: In<'a>,
    pub eps: f32,
}

/// `squares [ceil(n / BLOCK)] (f64)` = the sums of squares of a range's exact weights.
pub struct WeightSquares<'a> {
    pub squares: Out<'a>,
    /// `[n]` f32 or bf16; read.
    pub parameters: Out<'a>,
    /// Read.
    pub master: MasterOperand<'a>,
}

/// `out [1] (f32)` = the step of a tensor's weights along its updates: `rates[1]` times the root mean square of its weights,
/// which is at least `least_rms`; divided by that of its updates in units of `threshold`, if it is above 1. `squares [2, g]`
/// (f64) are those of updates, then of weights.
pub struct AdafactorRate<'a> {
    pub out: Out<'a>,
    pub squares: In<'a>,
    /// As in [`FactorVariance`].
    pub rates: In<'a>,
    /// Elements of the tensor.
    pub elements: usize,
    pub least_rms: f32,
    pub threshold: f32,
}

/// The step of a range's weights: they lose `rates[2]` x `weight_decay` of themselves, then `rate [1]` (f32) x their updates
/// (see [`UpdateSquares`]). If the clipping factor is not finite, nothing is changed.
pub struct AdafactorStep<'a> {
    /// Weights `[n]`, f32 or bf16; written.
    pub parameters: Out<'a>,
    /// The exact weights; read and written.
    pub master: MasterOperand<'a>,
    /// `[n]` f32 or bf16, before clipping.
    pub gradients: In<'a>,
    /// Written if it has one element per gradient.
    pub variance: VarianceOperand<'a>,
    pub rate: In<'a>,
    /// As in [`FactorVariance`].
    pub rates: In<'a>,
    /// `[2]` f32, as in [`super::AdamW`].
    pub clip: In<'a>,
    /// `[2]` u32, as in [`super::AdamW`].
    pub key: In<'a>,
    /// As in [`super::AdamW`].
    pub first_index: u64,
    pub eps: f32,
    pub weight_decay: f32,
}

fn check_first(check: &Check, name: &str, first: usize) -> Checked {
    check.that(first.is_multiple_of(BLOCK), || {
        format!("`{name}` is {first}, expected a multiple of {BLOCK}")
    })
}

fn check_within(check: &Check, shape: &MatricesShape, first: usize, n: usize) -> Checked {
    shape.check(check)?;
    check_first(check, "first", first)?;
    check.that(first + n <= shape.elements(), || {
        format!("elements {first} to {} of {shape:?}", first + n)
    })
}

impl VarianceOperand<'_> {
    fn check(&self, check: &Check, n: usize) -> Checked {
        match self {
            VarianceOperand::Elements(variance) => {
                check.tensor("variance", variance, &[n], DType::F32)
            }
            VarianceOperand::Factors {
                factors,
                columns,
                first,
                shape,
            } => {
                check.tensor("factors", factors, &[shape.all_rows()], DType::F32)?;
                check.tensor("columns", columns, &[shape.all_columns()], DType::F32)?;
                check_within(check, shape, *first, n)
            }
        }
    }

    /// The tensors of the variance. `is_changed` says that the operation also writes a variance of one element per
    /// gradient.
    fn operands(&self, is_changed: bool) -> Vec<Operand<'_>> {
        match self {
            VarianceOperand::Elements(variance) if is_changed => vec![changes(variance)],
            VarianceOperand::Elements(variance) => vec![reads(variance.as_in())],
            VarianceOperand::Factors {
                factors, columns, ..
            } => vec![reads(*factors), reads(*columns)],
        }
    }
}

impl Contract for VarianceScale<'_> {
    fn name(&self) -> &'static str {
        "variance_scale"
    }

    fn check(&self, check: &Check) -> Checked {
        check.rank("grains", &self.grains, 1)?;
        check.tensor("grains", &self.grains, self.grains.dims(), DType::F64)?;
        check.tensor("clip", &self.clip, &[2], DType::F32)?;
        check.tensor("out", &self.out, &[1], DType::F64)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![reads(self.grains)]
    }
}

impl Contract for VarianceSums<'_> {
    fn name(&self) -> &'static str {
        "variance_sums"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real_of_rank("gradients", &self.gradients, 1)?;
        check.tensor("sums", &self.sums, &[self.shape.sums()], DType::F64)?;
        check.tensor("clip", &self.clip, &[2], DType::F32)?;
        check.tensor("scale", &self.scale, &[1], DType::F64)?;
        check_within(check, &self.shape, self.first, self.gradients.elements())
    }

    /// Gradients are read twice, by rows and by columns.
    fn operands(&self) -> Vec<Operand<'_>> {
        vec![
            reads(self.gradients),
            reads(self.gradients),
            writes(&self.sums),
        ]
    }

    fn sizes(&self) -> Vec<usize> {
        let mut sizes = self.shape.sizes();
        sizes.push(self.gradients.elements());
        sizes
    }
}

impl Contract for FactorVariance<'_> {
    fn name(&self) -> &'static str {
        "factor_variance"
    }

    fn check(&self, check: &Check) -> Checked {
        self.shape.check(check)?;
        let (rows, columns) = (self.shape.all_rows(), self.shape.all_columns());
        check.tensor("rows", &self.rows, &[rows], DType::F32)?;
        check.tensor("columns", &self.columns, &[columns], DType::F32)?;
        check.tensor("factors", &self.factors, &[rows], DType::F32)?;
        check.rank("sums", &self.sums, 2)?;
        let sums = [self.sums.dims()[0], self.shape.sums()];
        check.tensor("sums", &self.sums, &sums, DType::F64)?;
        check.tensor("scale", &self.scale, &[1], DType::F64)?;
        check.tensor("rates", &self.rates, &[3], DType::F32)?;
        check.tensor("clip", &self.clip, &[2], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![
            changes(&self.rows),
            changes(&self.columns),
            writes(&self.factors),
            reads(self.sums),
        ]
    }

    fn sizes(&self) -> Vec<usize> {
        let mut sizes = self.shape.sizes();
        sizes.push(self.sums.dims()[0]);
        sizes
    }
}

impl Contract for UpdateSquares<'_> {
    fn name(&self) -> &'static str {
        "update_squares"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real_of_rank("gradients", &self.gradients, 1)?;
        let n = self.gradients.elements();
        check.tensor("squares", &self.squares, &[n.div_ceil(BLOCK)], DType::F64)?;
        self.variance.check(check, n)?;
        check.tensor("rates", &self.rates, &[3], DType::F32)?;
        check.tensor("clip", &self.clip, &[2], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let own = [reads(self.gradients), writes(&self.squares)].into_iter();
        own.chain(self.variance.operands(false)).collect()
    }
}

impl Contract for WeightSquares<'_> {
    fn name(&self) -> &'static str {
        "weight_squares"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real_of_rank("parameters", &self.parameters, 1)?;
        let (n, weights) = (self.parameters.elements(), self.parameters.dtype());
        self.master.check(check, n, weights)?;
        check.tensor("squares", &self.squares, &[n.div_ceil(BLOCK)], DType::F64)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let weights = match &self.master {
            MasterOperand::Parameters => vec![reads(self.parameters.as_in())],
            MasterOperand::F32(master) => vec![reads(master.as_in())],
            MasterOperand::Remainder(rest) => {
                vec![reads(self.parameters.as_in()), reads(rest.as_in())]
            }
        };
        weights.into_iter().chain([writes(&self.squares)]).collect()
    }
}

impl Contract for AdafactorRate<'_> {
    fn name(&self) -> &'static str {
        "adafactor_rate"
    }

    fn check(&self, check: &Check) -> Checked {
        check.that(self.elements > 0, || "the tensor has no element".into())?;
        let squares = [2, self.elements.div_ceil(BLOCK)];
        check.tensor("squares", &self.squares, &squares, DType::F64)?;
        check.tensor("rates", &self.rates, &[3], DType::F32)?;
        check.tensor("out", &self.out, &[1], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![reads(self.squares)]
    }
}

impl Contract for AdafactorStep<'_> {
    fn name(&self) -> &'static str {
        "adafactor_step"
    }

    fn check(&self, check: &Check) -> Checked {
        let (n, weights) = (self.parameters.elements(), self.parameters.dtype());
        check.real_of_rank("parameters", &self.parameters, 1)?;
        self.master.check(check, n, weights)?;
        check.real("gradients", &self.gradients, &[n])?;
        self.variance.check(check, n)?;
        check.tensor("rate", &self.rate, &[1], DType::F32)?;
        check.tensor("rates", &self.rates, &[3], DType::F32)?;
        check.tensor("clip", &self.clip, &[2], DType::F32)?;
        check.tensor("key", &self.key, &[2], DType::U32)?;
        check_first(check, "first_index", self.first_index as usize)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let weights = self.master.operands(&self.parameters).into_iter();
        let read = [reads(self.gradients)].into_iter();
        weights
            .chain(read)
            .chain(self.variance.operands(true))
            .collect()
    }
}
