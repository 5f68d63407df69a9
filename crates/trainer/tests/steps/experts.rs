//! Models with experts: whatever is recomputed or offloaded, and wherever tokens are sent, a step has the same bits, and memory is
//! what was planned.

use crate::common::elsewhere::{OPTIMIZERS, bits, forms, run, with_form, with_optimizer};
use crate::common::experts::{LAYERS, deepseek, models};
use crate::common::side_by_side::side_by_side;
use crate::common::{assert_as_planned, parameters, plan, policies, session, step_batch};
use data::{MASKED, Packing};
use memory::DType;
use model::{Attention, ModelConfig};
use session::Session;
use settings::Settings;
use std::collections::{BTreeMap, BTreeSet};

const STEPS: usize = 2;

/// Stages of which some policy replays each.
const REPLAYED: [&str; 6] = [
    "moe_router",
    "moe_choice",
    "moe_tables",
    "moe_up",
    "moe_act",
    "mla_up",
];

/// f32; bf16 with remainders; bf16 with masters and 8-bit moments.
const FORMS: [usize; 3] = [0, 7, 9];

fn keeps_everything(model: &ModelConfig, number: usize) -> Settings {
    let kind = OPTIMIZERS[number % 3];
    let form = match kind {
        optim::OptimizerKind::Adafactor => 4,
        _ => FORMS[number / 3 % 3],
    };
    let settings = with_form(model.clone(), forms()[form], "none", DType::F32);
    Settings {
        attention: [Attention::Flash, Attention::Eager][number % 2],
        micro_batch: 2,
        seq: 21,
        accum: 2,
        router_bias_rate: 0.01,
        ..with_optimizer(settings, kind)
    }
}

#[test]
fn policies_change_nothing_but_memory() {
    let models = models();
    let all = models
        .each_ref()
        .map(|(_, model)| policies(model.labels(), LAYERS));
    let runs = (0..all.len()).flat_map(|of| (0..all[of].len()).map(move |number| (of, number)));
    let seen = std::sync::Mutex::new(BTreeSet::<&str>::new());
    side_by_side(runs, |(of, number)| {
        let (text, policy) = &all[of][number];
        let kept = keeps_everything(&models[of].1, number);
        let moved = Settings {
            policy: policy.clone(),
            ..kept.clone()
        };
        let name = format!("{}, {text}", models[of].0);
        let (planned, as_kept) = (plan(&moved), plan(&kept));
        let expected = run(&mut session(&kept), &kept, 0..STEPS, |outcome| {
            assert_as_planned(&name, &as_kept, outcome);
            assert_eq!(outcome.replayed.total(), 0, "{name}");
        });
        let actual = run(&mut session(&moved), &moved, 0..STEPS, |outcome| {
            assert_as_planned(&name, &planned, outcome);
            let replayed = REPLAYED
                .iter()
                .filter(|stage| outcome.replayed.get(stage) > 0);
            seen.lock().unwrap().extend(replayed);
        });
        assert_eq!(actual.steps, expected.steps, "{name}");
        assert!(actual.state == expected.state, "{name}");
    });
    // The routers and everything behind them were made again.
    assert_eq!(seen.lock().unwrap().len(), REPLAYED.len());
}

/// Sets every parameter whose name ends in one of these ways, by the number of an element.
fn set(session: &mut Session, ends: &[&str], value: impl Fn(usize) -> f32) {
    let layout = session.model().layout().clone();
    let mut found = layout
        .entries()
        .iter()
        .filter(|entry| ends.iter().any(|end| entry.name.ends_with(end)))
        .peekable();
    assert!(found.peek().is_some(), "{ends:?}");
    for entry in found {
        let values: Vec<f32> = (0..entry.elements()).map(&value).collect();
        session
            .incoming()
            .set_values(entry.offset, &values)
            .unwrap();
    }
}

/// How families name their routers.
const ROUTERS: [&str; 2] = ["mlp.gate.weight", "mlp.router.weight"];

/// A way to send tokens to experts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sent {
    /// As fresh weights send them.
    Anywhere,
    /// All rows of the routers' matrices are equal, so all logits of a token are.
    Tied,
    /// The norm before the router gives a constant, by which the first experts' logits are far above the others'.
    ToTheFirst,
}

fn send(session: &mut Session, sent: Sent, hidden: usize) {
    match sent {
        Sent::Anywhere => {}
        Sent::Tied => set(session, &ROUTERS, |at| (at % hidden) as f32 / 99.0 - 0.2),
        Sent::ToTheFirst => {
            // x is nearly equal to a constant vector where the embedding is.
            set(session, &["embed_tokens.weight"], |at| {
                5.0 + (at % 7) as f32 * 0.01
            });
            set(session, &ROUTERS, |at| -((at / hidden) as f32));
        }
    }
}

/// The peak does not depend on the choices, and ties are broken in every replay as before.
#[test]
fn the_peak_does_not_depend_on_where_tokens_are_sent() {
    for (name, model) in models() {
        let mut loads = BTreeMap::new();
        for sent in [Sent::Anywhere, Sent::Tied, Sent::ToTheFirst] {
            for dtype in [DType::F32, DType::BF16] {
                let runs = ["none", "moe", "full"].map(|mode| {
                    let mut config = crate::common::config(model.clone(), dtype, mode);
                    (config.data.seq, config.batch.micro) = (23, 2);
                    let settings = Settings::new(&config).unwrap();
                    let mut session = session(&settings);
                    send(&mut session, sent, model.hidden);
                    let planned = plan(&settings);
                    let mut steps = Vec::new();
                    for step in 0..STEPS {
                        let outcome = session.step(&step_batch(&settings, step)).unwrap();
                        assert_as_planned(&format!("{name}, {sent:?}, {mode}"), &planned, &outcome);
                        let choices = outcome.router_choices.as_ref().unwrap();
                        if step == 0 {
                            let load = choices.max_over_mean()[0];
                            loads.insert(format!("{sent:?} {dtype:?}"), load);
                        }
                        steps.push((
                            bits(&outcome),
                            outcome.router_losses.map(|of| of.map(f32::to_bits)),
                        ));
                    }
                    (steps, parameters(&session), planned.peak_bytes)
                });
                let [kept, moe, full] = runs;
                assert!(kept.2 > moe.2 && moe.2 > full.2, "{name}");
                for other in [moe, full] {
                    assert_eq!(other.0, kept.0, "{name}, {sent:?}, {dtype:?}");
                    assert!(other.1 == kept.1, "{name}, {sent:?}, {dtype:?}");
                }
            }
        }
        // Tied logits go to the lowest experts, too, so every token goes to the same ones.
        let experts = model.experts.as_ref().unwrap();
        let most = experts.count as f64 / experts.chosen as f64;
        assert_eq!(loads["Tied F32"], most, "{name} {loads:?}");
        assert_eq!(loads["ToTheFirst F32"], most, "{name} {loads:?}");
        assert!(loads["Anywhere F32"] < most, "{name} {loads:?}");
    }
}

/// The bias of each expert's choices, router by router.
fn biases(session: &Session) -> Vec<f32> {
    let layout = session.model().layout().clone();
    let biases = layout.entries().iter().enumerate();
    let biases = biases.filter(|(_, entry)| entry.name.ends_with("e_score_correction_bias"));
    biases
        .flat_map(|(index, _)| session.parameter(index).unwrap())
        .collect()
}

/// A step moves each bias by the rate, towards the mean load; a step that is skipped moves none.
#[test]
fn biases_of_choices_follow_the_load_and_skipped_steps_leave_them() {
    let settings = Settings {
        router_bias_rate: 0.125,
        ..keeps_everything(&deepseek(), 0)
    };
    let mut session = session(&settings);
    assert!(biases(&session).iter().all(|bias| *bias == 0.0));
    let outcome = session.step(&step_batch(&settings, 0)).unwrap();
    let moved = biases(&session);
    let counts = outcome.router_choices.unwrap();
    let expected = counts.routers().flat_map(|counts| {
        let mean = counts.iter().sum::<f32>() / counts.len() as f32;
        let moved = counts.iter().map(move |count| match mean - count {
            0.0 => 0.0,
            less => 0.125 * less.signum(),
        });
        moved.collect::<Vec<_>>()
    });
    assert_eq!(moved, expected.collect::<Vec<_>>());
    assert!(moved.iter().any(|bias| *bias > 0.0) && moved.iter().any(|bias| *bias < 0.0));
    let layout = session.model().layout().clone();
    let norm = layout.find("model.norm.weight").unwrap();
    let place = layout.entries()[norm].offset;
    session.incoming().set_values(place, &[f32::NAN]).unwrap();
    let skipped = session.step(&step_batch(&settings, 1)).unwrap();
    assert!(!skipped.is_finite());
    assert_eq!(biases(&session), moved);
}

/// Which tokens padding has changes no loss and no gradient, and the plan knows of lengths.
#[test]
fn losses_of_routers_do_not_depend_on_padding() {
    for (name, model) in models() {
        let settings = Settings {
            packing: Packing::Pad,
            ..keeps_everything(&model, 0)
        };
        let run = |padding: i32, has_lengths: bool| {
            let mut batch = step_batch(&settings, 0);
            for micro in &mut batch.micro {
                micro.lengths = has_lengths.then(|| vec![9, 21]);
                micro.input_ids[9..21].fill(padding);
                micro.targets[9..21].fill(MASKED);
            }
            let outcome = session(&settings).step(&batch).unwrap();
            if has_lengths {
                assert_as_planned(name, &plan(&settings), &outcome);
            }
            let [aux, z] = outcome.router_losses.unwrap();
            let shown = [outcome.loss, outcome.grad_norm, aux, z];
            assert!(shown.iter().all(|value| value.is_finite()), "{shown:?}");
            shown
        };
        let far = |one: [f32; 4], other: [f32; 4]| {
            let pairs = one.into_iter().zip(other);
            pairs.map(|(one, other)| (one - other).abs() / one.max(1e-9))
        };
        let with = far(run(1, true), run(2, true)).fold(0.0, f32::max);
        let without = far(run(1, false), run(2, false)).fold(0.0, f32::max);
        assert!(with < 1e-6 && without > 1e-4, "{name}: {with} {without}");
    }
}

/// What is added to the loss changes gradients, and is reported beside the loss.
#[test]
fn losses_of_routers_stand_beside_the_loss() {
    for (name, model) in models() {
        let plain = ModelConfig {
            router_aux: 0.0,
            router_z_loss: 0.0,
            ..model.clone()
        };
        let [with, without] = [&model, &plain].map(|model| {
            let settings = keeps_everything(model, 0);
            session(&settings).step(&step_batch(&settings, 0)).unwrap()
        });
        // With losses of routers, those of a micro-batch are added up apart first.
        let difference = (with.loss / without.loss - 1.0).abs();
        assert!(difference < 1e-6, "{name}: {difference}");
        assert_ne!(with.grad_norm, without.grad_norm, "{name}");
        assert_eq!(without.router_losses, None);
        let [aux, z] = with.router_losses.unwrap();
        assert!(
            aux > 0.0 && (z > 0.0) == (model.router_z_loss > 0.0),
            "{name}"
        );
    }
}
