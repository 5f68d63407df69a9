//! Adafactor on ranges of a tensor, against loops in f64; the bits do not depend on the ranges, nor on the device.

use crate::DTYPES;
use crate::adamw::{Weights, halves, weights};
use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor, computing};
use crate::host::Host;
use crate::muon::{clip, key, random};
use kernels::{KernelError, MasterOperand, MatricesShape, NormGrains, VarianceOperand};
use memory::{DType, GRAIN_ELEMENTS};
use std::ops::Range;

const EPS: f32 = 1e-7;
const RATES: [f32; 3] = [0.3, 0.02, 0.05];
const LEAST_RMS: f32 = 1e-3;
const THRESHOLD: f32 = 0.8;
const WEIGHT_DECAY: f32 = 0.1;

/// One element, a row, a column, rows that end within blocks, wide rows, several matrices.
const SHAPES: [[usize; 3]; 6] = [
    [1, 1, 1],
    [1, 1, 700],
    [1, 300, 1],
    [1, 90, 37],
    [1, 33, 1300],
    [3, 20, 50],
];

fn shape([matrices, rows, columns]: [usize; 3]) -> MatricesShape {
    MatricesShape {
        matrices,
        rows,
        columns,
    }
}

fn rates(device: &Device) -> Tensor {
    device.put(&Host::new(DType::F32, [3], RATES.map(f64::from)))
}

/// Gradients of very different sizes, as rows have them.
fn gradients(dtype: DType, shape: &MatricesShape) -> Host {
    let values = random(shape.elements(), 1.0, 5);
    let sized = values.into_iter().enumerate().map(|(at, value)| {
        let row = at / shape.columns;
        value * 10f64.powi(-((row % 7) as i32))
    });
    Host::new(dtype, [shape.elements()], sized)
}

/// Positive states.
fn states(elements: usize, seed: u64) -> Host {
    let values = random(elements, 1.0, seed);
    Host::new(DType::F32, [elements], values.into_iter().map(f64::abs))
}

/// The step of a factored variance, of sums that come in several ranges.
#[derive(Debug)]
struct Factored {
    gradients: DType,
    shape: [usize; 3],
    clip: f32,
    /// Where ranges begin, beside the first.
    cuts: &'static [usize],
}

impl Factored {
    fn shape(&self) -> MatricesShape {
        shape(self.shape)
    }

    /// Those ranges that the tensor has.
    fn ranges(&self) -> Vec<Range<usize>> {
        let n = self.shape().elements();
        let cuts = self.cuts.iter().copied().filter(|cut| *cut < n);
        let starts = [0].into_iter().chain(cuts.clone());
        starts.zip(cuts.chain([n])).map(|(a, b)| a..b).collect()
    }
}

impl Case for Factored {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let shape = self.shape();
        let x = device.put(&gradients(self.gradients, &shape));
        let (clip, rates) = (clip(device, self.clip), rates(device));
        let n = shape.elements();
        let mut grains = device.room(DType::F64, [n.div_ceil(GRAIN_ELEMENTS)]);
        let mut scale = device.room(DType::F64, [1]);
        let ranges = self.ranges();
        let mut sums = device.room(DType::F64, [ranges.len(), shape.sums()]);
        device.run(NormGrains {
            grains: grains.view_mut(),
            x: x.view(),
        })?;
        device.run(kernels::VarianceScale {
            out: scale.view_mut(),
            grains: grains.view(),
            clip: clip.view(),
        })?;
        for (number, range) in ranges.into_iter().enumerate() {
            let own = sums.view_mut().rows(number..number + 1);
            device.run(kernels::VarianceSums {
                sums: own.reshape([shape.sums()]),
                gradients: x.view().rows(range.clone()),
                clip: clip.view(),
                scale: scale.view(),
                first: range.start,
                shape,
            })?;
        }
        let mut rows = device.put(&states(shape.all_rows(), 1));
        let mut columns = device.put(&states(shape.all_columns(), 2));
        let mut factors = device.room(DType::F32, [shape.all_rows()]);
        device.run(kernels::FactorVariance {
            rows: rows.view_mut(),
            columns: columns.view_mut(),
            factors: factors.view_mut(),
            sums: sums.view(),
            scale: scale.view(),
            rates: rates.view(),
            clip: clip.view(),
            eps: EPS,
            shape,
        })?;
        Ok([&rows, &columns, &factors].map(|x| device.take(x)).into())
    }

    fn expected(&self) -> Vec<Expected> {
        let shape = self.shape();
        let mut rows = states(shape.all_rows(), 1).values();
        let mut columns = states(shape.all_columns(), 2).values();
        if !self.clip.is_finite() {
            let zero = vec![0.0; rows.len()];
            return vec![
                Expected::new("factored: rows, skipped", rows, Rule::Exact),
                Expected::new("factored: columns, skipped", columns, Rule::Exact),
                Expected::new("factored: skipped", zero, Rule::Exact),
            ];
        }
        let squares = gradients(self.gradients, &shape).values();
        let squares: Vec<f64> = squares
            .into_iter()
            .map(|x| (x * f64::from(self.clip)).powi(2))
            .collect();
        let rate = f64::from(RATES[0]);
        let (mut by_rows, mut by_columns) = (vec![0.0; rows.len()], vec![0.0; columns.len()]);
        for (at, square) in squares.iter().enumerate() {
            let row = at / shape.columns;
            let column = row / shape.rows * shape.columns + at % shape.columns;
            by_rows[row] += square / shape.columns as f64;
            by_columns[column] += square / shape.rows as f64;
        }
        for (states, means) in [(&mut rows, by_rows), (&mut columns, by_columns)] {
            for (state, mean) in states.iter_mut().zip(means) {
                *state += rate * (mean - *state);
            }
        }
        let of_matrix = |rows: &[f64]| {
            let mean = rows.iter().sum::<f64>() / rows.len() as f64;
            let divisor = mean.max(f64::from(EPS));
            rows.iter().map(|row| row / divisor).collect::<Vec<f64>>()
        };
        let factors = rows.chunks(shape.rows).flat_map(of_matrix).collect();
        vec![
            Expected::new("factored: rows", rows, Rule::Standard),
            Expected::new("factored: columns", columns, Rule::Standard),
            Expected::new("factored", factors, Rule::Standard),
        ]
    }
}

/// How the variance is kept.
#[derive(Clone, Copy, Debug)]
enum Kept {
    Factored,
    Elementwise,
}

/// The sums, the rate and the step of a tensor's range.
#[derive(Debug)]
struct Step {
    form: Weights,
    kept: Kept,
    gradients: DType,
    shape: [usize; 3],
    /// The first element, at most; a multiple of a block.
    first: usize,
    clip: f32,
}

impl Step {
    fn shape(&self) -> MatricesShape {
        shape(self.shape)
    }

    fn range(&self) -> Range<usize> {
        let n = self.shape().elements();
        match self.first < n {
            true => self.first..n,
            false => 0..n,
        }
    }

    fn gradients(&self) -> Host {
        let all = gradients(DType::F32, &self.shape()).values();
        let range = self.range();
        Host::new(self.gradients, [range.len()], all[range].iter().copied())
    }

    fn weights(&self) -> Vec<Host> {
        weights(self.form, &random(self.range().len(), 1.0, 3))
    }

    fn exact(&self) -> Vec<f64> {
        self.form.exact(&self.weights()).values()
    }

    /// The variances before the step, or the factors and the columns.
    fn states(&self) -> Vec<Host> {
        let shape = self.shape();
        match self.kept {
            Kept::Elementwise => vec![states(self.range().len(), 4)],
            Kept::Factored => vec![states(shape.all_rows(), 5), states(shape.all_columns(), 6)],
        }
    }

    /// Variances after the step, and updates.
    fn oracle(&self) -> (Vec<f64>, Vec<f64>) {
        let (shape, states) = (self.shape(), self.states());
        let states: Vec<Vec<f64>> = states.iter().map(Host::values).collect();
        let gradients = self.gradients().values();
        let both = gradients.iter().enumerate().map(|(index, gradient)| {
            let gradient = gradient * f64::from(self.clip);
            let variance = match self.kept {
                Kept::Elementwise => {
                    let before = states[0][index];
                    before + f64::from(RATES[0]) * (gradient * gradient - before)
                }
                Kept::Factored => {
                    let at = self.range().start + index;
                    let row = at / shape.columns;
                    let column = row / shape.rows * shape.columns + at % shape.columns;
                    states[0][row] * states[1][column]
                }
            };
            let least = f64::from(EPS).powi(2);
            (variance, gradient / variance.max(least).sqrt())
        });
        both.unzip()
    }

    fn master<'a>(&self, mut rest: impl Iterator<Item = &'a mut Tensor>) -> MasterOperand<'a> {
        let mut next = || rest.next().expect("a tensor beside the weights");
        self.form.operand(|| next().view_mut())
    }

    fn variance<'a>(&self, states: &'a mut [Tensor]) -> VarianceOperand<'a> {
        match states {
            [state] => VarianceOperand::Elements(state.view_mut()),
            [factors, columns] => VarianceOperand::Factors {
                factors: factors.view(),
                columns: columns.view(),
                first: self.range().start,
                shape: self.shape(),
            },
            _ => unreachable!("one state or two"),
        }
    }
}

impl Case for Step {
    /// Grains of updates and weights, the rate, the variances, the exact weights; behind a master, the weights less what they
    /// must be.
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let put = |hosts: Vec<Host>| -> Vec<Tensor> {
            hosts.iter().map(|host| device.put(host)).collect()
        };
        let (mut weights, mut states) = (put(self.weights()), put(self.states()));
        let gradients = device.put(&self.gradients());
        let (clip, key, rates) = (clip(device, self.clip), key(device), rates(device));
        let n = self.range().len();
        let blocks = n.div_ceil(256);
        let mut grains = device.room(DType::F64, [2, blocks]);
        let [updates, of_weights]: [_; 2] = [0, 1].map(|row| row..row + 1);
        device.run(kernels::UpdateSquares {
            squares: grains.view_mut().rows(updates).reshape([blocks]),
            gradients: gradients.view(),
            variance: self.variance(&mut states),
            rates: rates.view(),
            clip: clip.view(),
            eps: EPS,
        })?;
        let [first, rest @ ..] = &mut weights[..] else {
            unreachable!("there are weights")
        };
        device.run(kernels::WeightSquares {
            squares: grains.view_mut().rows(of_weights).reshape([blocks]),
            parameters: first.view_mut(),
            master: self.master(rest.iter_mut()),
        })?;
        let mut rate = device.room(DType::F32, [1]);
        device.run(kernels::AdafactorRate {
            out: rate.view_mut(),
            squares: grains.view(),
            rates: rates.view(),
            elements: n,
            least_rms: LEAST_RMS,
            threshold: THRESHOLD,
        })?;
        device.run(kernels::AdafactorStep {
            parameters: first.view_mut(),
            master: self.master(rest.iter_mut()),
            gradients: gradients.view(),
            variance: self.variance(&mut states),
            rate: rate.view(),
            rates: rates.view(),
            clip: clip.view(),
            key: key.view(),
            first_index: 1024,
            eps: EPS,
            weight_decay: WEIGHT_DECAY,
        })?;
        let mut taken = vec![device.take(&rate)];
        taken.extend(states.iter().map(|state| device.take(state)));
        let weights: Vec<Host> = weights.iter().map(|tensor| device.take(tensor)).collect();
        taken.push(self.form.exact(&weights));
        if weights.len() > 1 {
            let exact = taken.last().expect("the exact weights");
            let expected = halves(exact).values();
            let off = weights[0].values().into_iter().zip(expected);
            taken.push(Host::new(DType::BF16, [n], off.map(|(a, b)| a - b)));
        }
        Ok(taken)
    }

    fn expected(&self) -> Vec<Expected> {
        let n = self.range().len();
        let is_made = self.clip.is_finite();
        let (variances, updates) = self.oracle();
        let exact = self.exact();
        let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / n as f64).sqrt();
        let excess = (rms(&updates) / f64::from(THRESHOLD)).max(1.0);
        let rate = f64::from(RATES[1]) * rms(&exact).max(f64::from(LEAST_RMS)) / excess;
        let keep = 1.0 - f64::from(RATES[2]) * f64::from(WEIGHT_DECAY);
        let moved = exact.iter().zip(&updates);
        let moved = moved.map(|(weight, update)| weight * keep - rate * update);
        let mut expected = vec![Expected::new("adafactor: rate", vec![rate], Rule::Standard)];
        let states = self.states();
        expected.extend(states.iter().map(|state| match self.kept {
            Kept::Elementwise if is_made => {
                Expected::new("adafactor: variance", variances.clone(), Rule::Standard)
            }
            _ => Expected::new("adafactor: left", state.values(), Rule::Exact),
        }));
        let (values, rule) = match (is_made, self.form) {
            (false, _) => (exact.clone(), Rule::Exact),
            (true, form) => (moved.collect(), form.rule()),
        };
        expected.push(Expected::new("adafactor", values, rule));
        if self.form.has_master() {
            let zero = vec![0.0; n];
            expected.push(Expected::new(
                "adafactor: off the master",
                zero,
                Rule::Exact,
            ));
        }
        expected
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    let forms: &[Weights] = match dtype {
        DType::F32 => &[Weights::F32],
        _ => &[
            Weights::Master,
            Weights::Remainder,
            Weights::RemainderByte,
            Weights::Rounded,
        ],
    };
    for shape in SHAPES {
        for clip in [1.0, 0.25, f32::NAN] {
            for cuts in [&[][..], &[256], &[512, 2048]] {
                cases.push(Box::new(Factored {
                    gradients: dtype,
                    shape,
                    clip,
                    cuts,
                }));
            }
            for gradients in DTYPES {
                for (kept, first) in [
                    (Kept::Factored, 0),
                    (Kept::Factored, 512),
                    (Kept::Elementwise, 0),
                ] {
                    cases.extend(forms.iter().map(|form| -> Box<dyn Case> {
                        Box::new(Step {
                            form: *form,
                            kept,
                            gradients,
                            shape,
                            first,
                            clip,
                        })
                    }));
                }
            }
        }
    }
    cases
}

/// The bits of a tensor's variance are the same in whatever ranges its gradients are summed.
#[test]
fn adafactor_sums_are_the_same_in_any_ranges() {
    for dtype in DTYPES {
        for device in computing(dtype) {
            for shape in SHAPES {
                let variance = |cuts| {
                    let case = Factored {
                        gradients: dtype,
                        shape,
                        clip: 0.7,
                        cuts,
                    };
                    crate::case::run(&case, &device)
                };
                let whole = variance(&[]);
                for cuts in [&[256][..], &[256, 768, 1024, 20_480]] {
                    assert!(whole == variance(cuts), "{shape:?} on {}", device.name);
                }
            }
        }
    }
}

#[test]
fn adafactor_gives_the_same_bits_everywhere() {
    for dtype in DTYPES {
        let devices = computing(dtype);
        let [reference, others @ ..] = &devices[..] else {
            panic!("two implementations or more");
        };
        assert!(!others.is_empty(), "two implementations or more");
        for case in cases(dtype) {
            // The rate after a step that is skipped is no number, whose bits nobody reads.
            let outputs = |device| crate::case::run(case.as_ref(), device);
            let expected = outputs(reference);
            for device in others {
                let got = outputs(device);
                let is_same = got.iter().zip(&expected).all(|(got, expected)| {
                    got == expected || got.values().iter().all(|x| x.is_nan())
                });
                assert!(is_same, "{case:?} on {}", device.name);
            }
        }
    }
}
