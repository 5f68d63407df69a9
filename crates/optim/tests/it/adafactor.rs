//! Adafactor against its formulas in f64. That bits do not depend on homes is in `whole_tensors.rs`.

use crate::common::{Training, layout, noise};
use memory::{DType, Entry, Homes};
use optim::{Adafactor, Hyperparameters, MasterFormat, MomentFormat, OptimizerKind};

fn hyperparameters() -> Hyperparameters {
    Hyperparameters {
        kind: OptimizerKind::Adafactor,
        ..Hyperparameters::default()
    }
}

/// What the learning rate is in `common`.
const RATE: f64 = 1e-2;

/// A tensor in f64.
struct Oracle {
    weights: Vec<f64>,
    /// Of rows and columns; of a vector, of each element.
    variances: [Vec<f64>; 2],
    columns: usize,
}

fn rms(values: &[f64]) -> f64 {
    let squares: f64 = values.iter().map(|value| value * value).sum();
    (squares / values.len() as f64).sqrt()
}

impl Oracle {
    fn new(entry: &Entry) -> Oracle {
        let weights: Vec<f64> = entry.range().map(|at| f64::from(noise(1, at))).collect();
        let [rows, columns] = match entry.shape[..] {
            [rows, columns] => [rows, columns],
            _ => [entry.elements(), 0],
        };
        Oracle {
            weights,
            variances: [vec![0.0; rows], vec![0.0; columns]],
            columns,
        }
    }

    /// The variances of all elements after a step with these gradients.
    fn variances(&mut self, gradients: &[f64], rate: f64, eps: f64) -> Vec<f64> {
        let [rows, columns] = &mut self.variances;
        let towards = |state: &mut f64, mean: f64| *state += rate * (mean - *state);
        if columns.is_empty() {
            let pairs = rows.iter_mut().zip(gradients);
            pairs.for_each(|(state, gradient)| towards(state, gradient * gradient));
            return rows.clone();
        }
        for (state, row) in rows.iter_mut().zip(gradients.chunks(self.columns)) {
            towards(state, rms(row).powi(2));
        }
        for (column, state) in columns.iter_mut().enumerate() {
            let of_column: Vec<f64> = gradients
                .iter()
                .skip(column)
                .step_by(self.columns)
                .copied()
                .collect();
            towards(state, rms(&of_column).powi(2));
        }
        let mean = (rows.iter().sum::<f64>() / rows.len() as f64).max(eps);
        let of_row = |row: &f64| {
            columns
                .iter()
                .map(move |column| row * column / mean)
                .collect::<Vec<f64>>()
        };
        rows.iter().flat_map(of_row).collect()
    }

    fn step(&mut self, step: usize, gradients: &[f64], (numbers, decay): (&Adafactor, f64)) {
        let t = step as f64;
        let size = rms(&self.weights).max(numbers.least_rms) * RATE.min(1.0 / t.sqrt());
        let variances = self.variances(gradients, t.powf(numbers.beta2_decay), numbers.eps);
        let pairs = gradients.iter().zip(variances);
        let updates: Vec<f64> = pairs
            .map(|(gradient, variance)| gradient / variance.max(numbers.eps.powi(2)).sqrt())
            .collect();
        let size = size / (rms(&updates) / numbers.clip_threshold).max(1.0);
        for (weight, update) in self.weights.iter_mut().zip(updates) {
            *weight = *weight * (1.0 - RATE * decay) - size * update;
        }
    }
}

/// The weights after some steps, by the formulas.
fn oracle(hyperparameters: &Hyperparameters, steps: usize) -> Vec<Vec<f64>> {
    let layout = layout();
    let entries = layout.entries();
    let mut tensors: Vec<Oracle> = entries.iter().map(Oracle::new).collect();
    for step in 1..=steps {
        let gradients = entries.iter().zip(&tensors).map(|(entry, tensor)| {
            let noise = entry.range().map(|at| f64::from(noise(100 + step, at)));
            noise
                .zip(&tensor.weights)
                .map(|(a, b)| a + b)
                .collect::<Vec<f64>>()
        });
        let gradients: Vec<Vec<f64>> = gradients.collect();
        let squares: f64 = gradients.iter().flatten().map(|x| x * x).sum();
        let factor = (hyperparameters.clip_norm / (squares.sqrt() + 1e-6)).min(1.0);
        for ((tensor, gradients), entry) in tensors.iter_mut().zip(gradients).zip(entries) {
            let clipped: Vec<f64> = gradients.into_iter().map(|x| x * factor).collect();
            let decay = match entry.is_matrix() {
                true => hyperparameters.weight_decay,
                false => 0.0,
            };
            tensor.step(step, &clipped, (&hyperparameters.adafactor, decay));
        }
    }
    tensors.into_iter().map(|tensor| tensor.weights).collect()
}

/// The largest error of any weight after some steps.
fn error(hyperparameters: Hyperparameters, expected: &[Vec<f64>], steps: usize) -> f64 {
    let formats = (DType::F32, MomentFormat::F32, MasterFormat::None);
    let mut training = Training::by(hyperparameters, formats, &Homes::default());
    training.steps(1..=steps);
    let weights = training.weights();
    let layout = layout();
    let pairs = layout.entries().iter().zip(expected);
    let errors = pairs.flat_map(|(entry, expected)| {
        let found = weights[entry.range()]
            .iter()
            .map(|bits| f64::from(f32::from_bits(*bits)));
        found.zip(expected).map(|(a, b)| (a - b).abs())
    });
    errors.fold(0.0, f64::max)
}

#[test]
fn updates_are_those_of_the_formulas() {
    const STEPS: usize = 4;
    let cases = [
        Adafactor::default(),
        // Where the least variance, the least weights and the threshold count.
        Adafactor {
            eps: 0.01,
            ..Adafactor::default()
        },
        Adafactor {
            least_rms: 2.0,
            ..Adafactor::default()
        },
        Adafactor {
            clip_threshold: 0.3,
            beta2_decay: -0.5,
            ..Adafactor::default()
        },
    ];
    let by = |adafactor| Hyperparameters {
        adafactor,
        ..hyperparameters()
    };
    let default = oracle(&by(Adafactor::default()), STEPS);
    for (number, adafactor) in cases.into_iter().enumerate() {
        let expected = oracle(&by(adafactor), STEPS);
        let found = error(by(adafactor), &expected, STEPS);
        assert!(found < 1e-6, "{adafactor:?}: {found}");
        let other = error(by(adafactor), &default, STEPS);
        assert!((other > 1e-4) == (number > 0), "{adafactor:?}: {other}");
    }
}
