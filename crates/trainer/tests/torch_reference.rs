//! Five steps of training against PyTorch, in every recompute mode; and bf16 against f32.

mod common;

use common::golden::{Golden, Tensors, gradients, weights};
use common::{ATTENTIONS, MODES};
use memory::DType;
use model::Attention;
use trainer::settings::Settings;

/// How far a run is from the reference.
#[derive(Debug, Default)]
struct Distance {
    /// Largest relative difference of a step's loss.
    loss: f64,
    /// Largest relative difference of a step's gradient norm.
    grad_norm: f64,
    /// Largest difference of a first-step gradient, relative to its tensor's largest entry.
    gradient: f64,
    /// Largest difference of a weight after the last step, absolute.
    weight: f64,
}

fn relative(actual: f32, expected: f64) -> f64 {
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
        let scale = scale(expected);
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

fn distance(golden: &Golden, dtype: DType, attention: Attention, mode: &str) -> Distance {
    let settings = Settings {
        attention,
        ..golden.settings(dtype, mode)
    };
    let mut session = golden.session(&settings);
    let (batches, steps) = (golden.batches(), golden.steps());
    assert_eq!((batches.len(), steps.len()), (5, 5));
    let mut distance = Distance::default();
    for (index, (batch, expected)) in batches.iter().zip(&steps).enumerate() {
        let outcome = session.step(batch).unwrap();
        assert_eq!(outcome.targets, expected.targets);
        distance.loss = distance.loss.max(relative(outcome.loss, expected.loss));
        let norm = relative(outcome.grad_norm, expected.grad_norm);
        distance.grad_norm = distance.grad_norm.max(norm);
        if index == 0 {
            let expected = golden.tensors("grads_step0.safetensors");
            distance.gradient = largest_difference(&gradients(&session), &expected, largest_entry);
        }
    }
    let expected = golden.tensors("model_final.safetensors");
    distance.weight = largest_difference(&weights(&session), &expected, |_| 1.0);
    distance
}

/// Every mode with every kind of attention.
fn attentions_and_modes() -> impl Iterator<Item = (Attention, &'static str)> {
    let pairs = |attention| MODES.map(|mode| (attention, mode));
    ATTENTIONS.into_iter().flat_map(pairs)
}

/// Five steps move the weights by far more than the tolerance, or comparing them would show nothing.
#[test]
fn the_reference_moves() {
    for golden in Golden::all() {
        let (first, last) = (
            golden.tensors("model.safetensors"),
            golden.tensors("model_final.safetensors"),
        );
        for (name, last) in &last {
            let moved = first[name].iter().zip(last).map(|(a, b)| (a - b).abs());
            assert!(moved.fold(0.0, f32::max) > 1e-3, "{name}");
        }
    }
}

#[test]
fn f32_agrees_with_pytorch_in_every_mode() {
    for golden in Golden::all() {
        for (attention, mode) in attentions_and_modes() {
            let distance = distance(&golden, DType::F32, attention, mode);
            println!("{} {attention:?} {mode}: {distance:?}", golden.name());
            let within = distance.loss < 1e-5
                && distance.grad_norm < 1e-5
                && distance.gradient < 1e-4
                && distance.weight < 1e-4;
            assert!(
                within,
                "{} {attention:?} {mode}: {distance:?}",
                golden.name()
            );
        }
    }
}

/// Twice what was seen: losses 2.2e-4, gradient norms 3.8e-3, gradients 2.0e-2 of their tensor's largest entry. A bf16
/// has 8 bits, so each rounding is up to 0.4 %. Weights may differ by Adam steps of opposite sign, five of 1e-3 each.
#[test]
fn bf16_is_near_pytorchs_f32_in_every_mode() {
    for golden in Golden::all() {
        for (attention, mode) in attentions_and_modes() {
            let distance = distance(&golden, DType::BF16, attention, mode);
            println!("{} {attention:?} {mode}: {distance:?}", golden.name());
            let within = distance.loss < 5e-4
                && distance.grad_norm < 8e-3
                && distance.gradient < 4e-2
                && distance.weight < 1e-2;
            assert!(
                within,
                "{} {attention:?} {mode}: {distance:?}",
                golden.name()
            );
            assert!(distance.gradient > 1e-4, "this was not bf16: {distance:?}");
        }
    }
}

/// Another run from the same weights does not pass.
#[test]
fn the_comparison_sees_a_wrong_learning_rate_and_a_wrong_batch() {
    let [golden, _] = Golden::all();
    let mut settings = golden.settings(DType::F32, "none");
    settings.schedule.peak *= 1.1;
    let mut session = golden.session(&settings);
    let batches = golden.batches();
    let first = session.step(&batches[0]).unwrap();
    let second = session.step(&batches[1]).unwrap();
    let steps = golden.steps();
    assert!(relative(first.loss, steps[0].loss) < 1e-5);
    assert!(relative(second.loss, steps[1].loss) > 1e-5);
    let first = golden.session(&settings).step(&batches[1]).unwrap();
    assert!(relative(first.loss, steps[0].loss) > 1e-3);
}
