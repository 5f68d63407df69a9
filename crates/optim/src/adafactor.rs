//! Adafactor (Shazeer and Stern 2018), as `torch.optim.Adafactor`. The variance of a matrix is kept by rows and
//! columns, and a tensor's step is relative to the size of its weights.

use crate::moment::Moment;
use crate::rule::{
    BySums, Keeps, ParameterGroup, Rule, StepNumbers, Summed, Sums, Update, UpdateQueue,
    WholeTensor,
};
use kernels::quantise::UNSIGNED;
use kernels::{
    AdafactorRate, AdafactorStep, FactorVariance, MatricesShape, MomentOperand, Result,
    UpdateSquares, VarianceOperand, VarianceScale, VarianceSums, WeightSquares,
};
use memory::{Cover, DType, In, Layout, Out, one_behind_another};
use std::ops::Range;

/// Adafactor's numbers that do not change during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    /// Exponent of the decay, below 0: at step t, variances move towards the squares by t^beta2_decay.
    pub beta2_decay: f64,
    /// Lower bounds: of a variance's root, and of the mean of the rows' variances.
    pub eps: f64,
    /// Lower bound of the root mean square of weights that a tensor's step is relative to.
    pub least_rms: f64,
    /// Updates with a larger root mean square are scaled down to it.
    pub clip_threshold: f64,
}

impl Default for Adafactor {
    fn default() -> Adafactor {
        Adafactor {
            beta2_decay: -0.8,
            eps: f64::from(f32::EPSILON),
            least_rms: 1e-3,
            clip_threshold: 1.0,
        }
    }
}

/// The variance of vectors, with one element per parameter. Settings never quantise it.
static VARIANCE: [Moment; 1] = [Moment {
    plain: "variance",
    codes: "variance.codes",
    absmax: "variance.absmax",
    map: &UNSIGNED,
}];

/// Adafactor for tensors that keep their variance in the same form.
struct AdafactorGroup {
    numbers: Adafactor,
    /// Whether the variance is kept by rows and columns, rather than one per element.
    is_factored: bool,
}

impl Adafactor {
    /// The groups of matrices and of vectors.
    pub(crate) fn groups(self, layout: &Layout) -> Vec<ParameterGroup> {
        let entries = layout.entries();
        let trained = entries.iter().enumerate();
        let trained = trained.filter(|(_, entry)| entry.role.is_trained());
        let (matrices, vectors): (Vec<_>, Vec<_>) =
            trained.partition(|(_, entry)| entry.is_matrix());
        let group = |is_factored, tensors: Vec<_>| {
            let tensors: Vec<WholeTensor> =
                tensors.into_iter().map(WholeTensor::of_entry).collect();
            let ranges = tensors.iter().map(|one| entries[one.entry].padded_range());
            ParameterGroup {
                rule: Rule::Sums(Box::new(AdafactorGroup {
                    numbers: self,
                    is_factored,
                })),
                cover: Cover::new(ranges),
                tensors,
            }
        };
        vec![group(true, matrices), group(false, vectors)]
    }
}

fn shape(tensor: &WholeTensor) -> MatricesShape {
    let [rows, columns] = tensor.shape;
    MatricesShape {
        matrices: tensor.count,
        rows,
        columns,
    }
}

impl Keeps for AdafactorGroup {
    fn moments(&self) -> &'static [Moment] {
        match self.is_factored {
            true => &[],
            false => &VARIANCE,
        }
    }

    fn tensor_states(&self, tensor: &WholeTensor) -> Vec<(&'static str, usize)> {
        if !self.is_factored {
            return Vec::new();
        }
        let shape = shape(tensor);
        vec![
            ("row_variance", shape.all_rows()),
            ("column_variance", shape.all_columns()),
        ]
    }

    fn rate_count(&self) -> usize {
        3
    }

    /// The rate of the variances, the largest step, and the learning rate.
    fn rates(&self, step: &StepNumbers) -> Vec<f32> {
        let update = step.update as f64;
        let rates = [
            update.powf(self.numbers.beta2_decay),
            step.learning_rate.min(1.0 / update.sqrt()),
            step.learning_rate,
        ];
        rates.map(|rate| rate as f32).to_vec()
    }
}

/// Where the parts of the scratch are, in bytes: an f64 factor on gradients, an f32 learning rate, and an f32 per row.
fn places(rows: usize) -> Vec<Range<usize>> {
    one_behind_another([8, 4, 4 * rows])
}

/// The parts of the scratch.
struct Scratch<'a> {
    scale: Out<'a>,
    rate: Out<'a>,
    factors: Out<'a>,
}

impl AdafactorGroup {
    fn factors(&self, tensor: &WholeTensor) -> usize {
        match self.is_factored {
            true => shape(tensor).all_rows(),
            false => 0,
        }
    }

    fn scratch<'a>(&self, tensor: &WholeTensor, scratch: Out<'a>) -> Scratch<'a> {
        let parts = scratch.disjoint_rows(&places(self.factors(tensor)));
        let Ok([scale, rate, factors]) = <[Out; 3]>::try_from(parts) else {
            unreachable!("there are three places")
        };
        Scratch {
            scale: scale.cast(DType::F64),
            rate: rate.cast(DType::F32),
            factors: factors.cast(DType::F32),
        }
    }

    fn eps(&self) -> f32 {
        self.numbers.eps as f32
    }

    /// The variance of a range.
    fn variance<'a>(
        &self,
        tensor: &WholeTensor,
        (states, factors): (&'a [Out], In<'a>),
        first: usize,
        moments: &mut Vec<MomentOperand<'a>>,
    ) -> VarianceOperand<'a> {
        if let [_, columns] = states {
            return VarianceOperand::Factors {
                factors,
                columns: columns.as_in(),
                first,
                shape: shape(tensor),
            };
        }
        match moments.pop() {
            Some(MomentOperand::Plain(variance)) => VarianceOperand::Elements(variance),
            _ => unreachable!("settings refuse states that are not f32"),
        }
    }

    /// The sums of squares of a range's updates and of its weights.
    fn sum_squares(
        &self,
        on: &UpdateQueue,
        summed: &mut Summed,
        (first, mut update): (usize, Update),
        sums: Vec<Out>,
    ) -> Result {
        let Ok([of_updates, of_weights]) = <[Out; 2]>::try_from(sums) else {
            unreachable!("there are two sums of each block")
        };
        let scratch = self.scratch(summed.tensor, summed.scratch.reborrow());
        let states = (&summed.states[..], scratch.factors.into_in());
        on.run(UpdateSquares {
            squares: of_updates,
            gradients: update.gradients,
            variance: self.variance(summed.tensor, states, first, &mut update.moments),
            rates: update.rates,
            clip: update.clip,
            eps: self.eps(),
        })?;
        on.run(WeightSquares {
            squares: of_weights,
            parameters: update.weights,
            master: update.master,
        })
    }
}

impl BySums for AdafactorGroup {
    fn sweeps(&self, tensor: &WholeTensor) -> Vec<Sums> {
        let of_squares = Sums::OfBlocks(2);
        match self.is_factored {
            true => vec![Sums::Exact(shape(tensor).sums()), of_squares],
            false => vec![of_squares],
        }
    }

    fn scratch_bytes(&self, tensor: &WholeTensor) -> usize {
        places(self.factors(tensor))[2].end
    }

    fn begin(&self, on: &UpdateQueue, summed: &mut Summed) -> Result {
        if !self.is_factored {
            return Ok(());
        }
        let scratch = self.scratch(summed.tensor, summed.scratch.reborrow());
        on.run(VarianceScale {
            out: scratch.scale,
            grains: summed.norm_grains,
            clip: summed.clip,
        })
    }

    fn sum(
        &self,
        on: &UpdateQueue,
        sweep: usize,
        summed: &mut Summed,
        (first, update): (usize, Update),
        mut sums: Vec<Out>,
    ) -> Result {
        if !self.is_factored || sweep > 0 {
            return self.sum_squares(on, summed, (first, update), sums);
        }
        let scratch = self.scratch(summed.tensor, summed.scratch.reborrow());
        on.run(VarianceSums {
            sums: sums.pop().expect("a range has one row of exact sums"),
            gradients: update.gradients,
            clip: update.clip,
            scale: scratch.scale.into_in(),
            first,
            shape: shape(summed.tensor),
        })
    }

    fn end_sweep(&self, on: &UpdateQueue, sweep: usize, summed: &mut Summed, sums: In) -> Result {
        let (rates, clip, tensor) = (summed.rates, summed.clip, summed.tensor);
        let scratch = self.scratch(tensor, summed.scratch.reborrow());
        if !self.is_factored || sweep > 0 {
            return on.run(AdafactorRate {
                out: scratch.rate,
                squares: sums,
                rates,
                elements: tensor.elements(),
                least_rms: self.numbers.least_rms as f32,
                threshold: self.numbers.clip_threshold as f32,
            });
        }
        let [rows, columns] = &mut summed.states[..] else {
            unreachable!("a matrix has two states")
        };
        on.run(FactorVariance {
            rows: rows.reborrow(),
            columns: columns.reborrow(),
            factors: scratch.factors,
            sums,
            scale: scratch.scale.into_in(),
            rates,
            clip,
            eps: self.eps(),
            shape: shape(tensor),
        })
    }

    fn apply(
        &self,
        on: &UpdateQueue,
        summed: &mut Summed,
        (first, mut update): (usize, Update),
    ) -> Result {
        let scratch = self.scratch(summed.tensor, summed.scratch.reborrow());
        let states = (&summed.states[..], scratch.factors.into_in());
        on.run(AdafactorStep {
            variance: self.variance(summed.tensor, states, first, &mut update.moments),
            parameters: update.weights,
            master: update.master,
            gradients: update.gradients,
            rate: scratch.rate.into_in(),
            rates: update.rates,
            clip: update.clip,
            key: update.key,
            first_index: update.first_index,
            eps: self.eps(),
            weight_decay: update.weight_decay,
        })
    }
}
