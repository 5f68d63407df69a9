//! The synthetic architecture trains as planned, with the same bits under every policy, and what it adds to the loss and
//! counts is added and counted once.

use crate::common::harness::{Outcome, Run};
use crate::common::synthetic::{LABELS, architecture};
use model::{Action, Actions, Attention, ModelConfig, OffloadLabels, Parameters, Policy};
use std::collections::BTreeMap;

const LAYERS: usize = 5;

fn config() -> ModelConfig {
    let text = r#"{"hidden": 20, "layers": 5, "heads": 2, "kv_heads": 1, "head_dim": 6, "ffn": 22, "vocab": 31}"#;
    serde_json::from_str(text).unwrap()
}

fn trained(kind: Attention, policy: &Policy) -> Outcome {
    let make = || architecture(&config(), kind, Parameters::default());
    let planned = Run::on_shapes(make(), policy).train(2);
    let made = Run::on_cpu(make(), policy).train(3);
    assert_eq!(made.peak_bytes, planned.peak_bytes, "{policy:?}");
    assert_eq!(made.replayed, planned.replayed, "{policy:?}");
    made
}

fn spec(text: &str) -> Policy {
    Policy::with_layers(LABELS, text, &BTreeMap::new(), LAYERS).unwrap()
}

#[test]
fn it_has_four_kinds_of_block() {
    let kinds = architecture(&config(), Attention::Eager, Parameters::default()).kinds();
    assert_eq!(kinds, [0, 1, 2, 3, 0]);
}

#[test]
fn blocks_with_latents_have_values_narrower_than_keys() {
    let architecture = architecture(&config(), Attention::Eager, Parameters::default());
    let run = Run::on_cpu(architecture, &Policy::keep_all_of(LABELS, LAYERS));
    let rows = |name: &str| {
        let entries = run.model.layout().entries();
        let entry = entries.iter().find(|entry| entry.name == name);
        entry.expect("every layer has it").shape[0]
    };
    for layer in 0..LAYERS {
        let [k, v] = ["k", "v"].map(|of| rows(&format!("layers.{layer}.{of}_proj.weight")));
        assert_eq!((k, v), (6, if layer % 2 == 1 { 3 } else { 6 }), "{layer}");
    }
}

#[test]
fn every_policy_gives_the_same_bits() {
    let keep_all = Policy::keep_all_of(LABELS, LAYERS);
    for kind in [Attention::Eager, Attention::Flash] {
        let keeps = trained(kind, &keep_all);
        assert_eq!(keeps.replayed.total(), 0);
        let bits = |run: &Outcome| (run.losses.clone(), run.weights.clone());
        let named = LABELS.named().map(|label| label.name().to_string());
        let full = ["full", "full:uniform:2", "full:block:3"].map(String::from);
        for text in named.chain(full) {
            let made = trained(kind, &spec(&text));
            assert!(made.replayed.total() > 0, "{text}");
            assert_eq!(bits(&made), bits(&keeps), "{text}");
        }
        for label in LABELS.iter() {
            let labels = OffloadLabels::parse_of(LABELS, label.name()).unwrap();
            let made = trained(kind, &keep_all.clone().offload(&labels).unwrap());
            let [more, fewer] = [&made, &keeps].map(|run| run.traffic.d2h_bytes);
            assert!(more > fewer, "{}", label.name());
            assert_eq!(bits(&made), bits(&keeps), "{}", label.name());
        }
        for number in 0..12 {
            let mut policy = keep_all.clone();
            for layer in 0..LAYERS {
                let mut actions = Actions::keep_all(LABELS);
                for (place, label) in LABELS.iter().enumerate() {
                    let of = [Action::Keep, Action::Recompute, Action::Offload];
                    let draw = crate::common::harness::noise(number, (100 * layer + place) as u64);
                    actions.set(label, of[((draw + 1.0) * 1.5) as usize % 3]);
                }
                policy.set_labels(layer..layer + 1, actions);
            }
            assert_eq!(bits(&trained(kind, &policy)), bits(&keeps), "{policy:?}");
        }
    }
}

/// A replay of the router adds nothing.
#[test]
fn losses_and_counts_of_a_stage_are_added_once() {
    let run = |policy: &Policy| {
        let mut run = Run::on_cpu(
            architecture(&config(), Attention::Eager, Parameters::default()),
            policy,
        );
        let replayed = run.pass(1, true);
        let counts = [2, 3].map(|layer| run.counted(layer, "moe_router").unwrap());
        assert!(run.counted(0, "moe_router").is_none());
        (run.loss(), counts, replayed)
    };
    let (loss, counts, _) = run(&Policy::keep_all_of(LABELS, LAYERS));
    assert!(counts.iter().all(|count| *count > 0.0));
    let (replayed_loss, replayed_counts, replayed) = run(&spec("moe,layernorm"));
    assert!(replayed.get("moe_router") > 0);
    assert_eq!((replayed_loss, replayed_counts), (loss, counts));
}

/// The gradient of a router's matrix is that of the loss, by its difference quotient.
#[test]
fn the_loss_of_a_stage_has_its_gradient() {
    let policy = Policy::keep_all_of(LABELS, LAYERS);
    let mut run = Run::on_cpu(
        architecture(&config(), Attention::Eager, Parameters::default()),
        &policy,
    );
    let entries = run.model.layout().clone();
    let gate = entries
        .entries()
        .iter()
        .position(|entry| entry.name == "layers.2.gate.weight");
    let gate = gate.expect("the router has a matrix");
    run.pass(1, true);
    let gradient = run.gradient(gate).to_vec();
    let targets = crate::common::harness::tokens(1).1.len() as f32;
    let (largest, _) = gradient
        .iter()
        .enumerate()
        .fold((0, 0.0), |most, (at, value)| {
            if value.abs() > most.1 {
                (at, value.abs())
            } else {
                most
            }
        });
    let mut loss_at = |step: f32| {
        run.change(gate, largest, step);
        run.pass(1, true);
        run.change(gate, largest, -step);
        run.loss()
    };
    let step = 1e-2;
    let slope = (loss_at(step) - loss_at(-step)) / (2.0 * step) / targets;
    let error = (slope / gradient[largest] - 1.0).abs();
    assert!(error < 2e-2, "{slope} {}", gradient[largest]);
}

#[test]
fn labels_that_it_does_not_have_are_told_the_nearest() {
    let refused = |text| {
        Policy::with_layers(LABELS, text, &BTreeMap::new(), LAYERS)
            .unwrap_err()
            .to_string()
    };
    assert!(refused("moe_roter").contains("did you mean `moe_router`?"));
    assert!(refused("mhc").contains("does not have; its labels are layernorm, mla_latent"));
    let away = OffloadLabels::parse_of(LABELS, "moe_dispach").unwrap_err();
    assert!(away.to_string().contains("did you mean `moe_dispatch`?"));
}
