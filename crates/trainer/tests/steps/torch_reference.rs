//! Five steps of training against PyTorch, in every recompute mode; and bf16 against f32.

use crate::common::distance::{distance, relative};
use crate::common::golden::Golden;
use crate::common::{ATTENTIONS, MODES};
use memory::DType;
use model::Attention;

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
