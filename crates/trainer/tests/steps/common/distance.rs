//! How far five steps are from those of a reference.

use super::golden::{Golden, Tensors, gradients, weights};
use memory::DType;
use model::Attention;

/// How far a run is from the reference.
#[derive(Debug, Default)]
pub struct Distance {
    /// Largest relative difference of a step's loss.
    pub loss: f64,
    /// Largest relative difference of a step's gradient norm.
    pub grad_norm: f64,
    /// Largest difference of a first-step gradient, relative to its tensor's largest entry.
    pub gradient: f64,
    /// Largest difference of a weight after the last step, absolute.
    pub weight: f64,
}

/// Runs the reference's steps and compares.
pub fn distance(golden: &Golden, dtype: DType, attention: Attention, mode: &str) -> Distance {
    let mut settings = golden.settings(dtype, mode);
    settings.attention = attention;
    let mut session = golden.session(&settings);
    let (batches, steps) = (golden.batches(), golden.steps());
    assert_eq!((batches.len(), steps.len()), (5, 5));
    let mut distance = Distance::default();
    for (index, (batch, expected)) in batches.iter().zip(&steps).enumerate() {
        let outcome = session.step(batch).unwrap();
        assert!(outcome.is_finite());
        assert_eq!(outcome.targets, expected.targets);
        distance.loss = distance.loss.max(relative(outcome.loss, expected.loss));
        let norm = relative(outcome.grad_norm, expected.grad_norm);
        distance.grad_norm = distance.grad_norm.max(norm);
        if index == 0 {
            let expected = golden.tensors("grads_step0.safetensors");
            distance.gradient = largest_difference(&gradients(&session), &expected, largest_entry);
        }
    }
    distance.weight = largest_difference(
        &without_keys_bias(weights(&mut session)),
        &without_keys_bias(golden.tensors("model_final.safetensors")),
        |_| 1.0,
    );
    distance
}

/// GPT-2 has no rotary embedding: its keys' bias adds the same to all scores of a row, so its gradient is nothing but
/// rounding, which AdamW makes whole steps of.
fn without_keys_bias(mut weights: Tensors) -> Tensors {
    for (name, bias) in &mut weights {
        if name.ends_with("c_attn.bias") {
            let width = bias.len() / 3;
            bias[width..2 * width].fill(0.0);
        }
    }
    weights
}

/// The difference as a share of what was expected.
pub fn relative(actual: f32, expected: f64) -> f64 {
    (f64::from(actual) - expected).abs() / expected.abs()
}

/// The largest difference of any entry of any tensor, which must all be there, divided by `scale` of its tensor.
fn largest_difference(actual: &Tensors, expected: &Tensors, scale: fn(&[f32]) -> f64) -> f64 {
    assert!(expected.len() >= 10, "a model has many tensors");
    assert_eq!(
        actual.keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>()
    );
    let mut largest = 0.0;
    for (name, expected) in expected {
        let actual = &actual[name];
        assert_eq!(actual.len(), expected.len(), "{name}");
        let is_zero = expected.iter().all(|value| *value == 0.0);
        // An expert to which no token goes has a gradient of zeros.
        let scale = match is_zero && name.contains(".experts.") {
            true => 1.0,
            false => scale(expected),
        };
        for (actual, expected) in actual.iter().zip(expected) {
            assert!(actual.is_finite(), "{name}");
            let difference = f64::from((actual - expected).abs()) / scale;
            largest = f64::max(largest, difference);
        }
    }
    largest
}

fn largest_entry(tensor: &[f32]) -> f64 {
    let largest = tensor
        .iter()
        .fold(0f32, |most, value| most.max(value.abs()));
    assert!(largest > 0.0, "the reference is not zero");
    f64::from(largest)
}
