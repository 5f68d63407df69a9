//! Optimizer states in pinned host memory: the same bits, planned to the byte, under any order that the queues' events
//! allow.

use crate::common::side_by_side::side_by_side;
use crate::common::{
    MODES, assert_as_planned, crossing, on_schedule, parameters, plan, session, settings,
    step_batch, variants,
};
use files::{Disk, write_tensors};
use memory::{DType, Home, Homes, Window};
use model::{ModelConfig, OffloadLabels};
use optim::{MasterFormat, MomentFormat};
use session::{Session, StepOutcome};
use settings::{Settings, StateFormats};
use std::path::Path;

const STEPS: usize = 20;

/// States of all formats: with f32 weights, and with bf16 weights and each kind of master.
const FORMS: [(DType, MomentFormat, MasterFormat); 5] = [
    (DType::F32, MomentFormat::F32, MasterFormat::None),
    (DType::F32, MomentFormat::Quantised, MasterFormat::None),
    (DType::BF16, MomentFormat::F32, MasterFormat::F32),
    (
        DType::BF16,
        MomentFormat::Quantised,
        MasterFormat::Remainder,
    ),
    (DType::BF16, MomentFormat::Bf16, MasterFormat::None),
];

fn offload(window: Window, fraction: f64) -> Homes {
    Homes {
        states: Home::Pinned,
        fraction,
        window,
        // Several chunks for the larger matrices.
        chunk_bytes: 20_000,
        ..Homes::default()
    }
}

fn with_states(
    model: ModelConfig,
    (dtype, moments, master): (DType, MomentFormat, MasterFormat),
    mode: &str,
) -> Settings {
    Settings {
        states: StateFormats {
            moments,
            master,
            f32_patterns: vec!["*embed_tokens*".into(), "*.wte.*".into()],
            ..StateFormats::default()
        },
        ..settings(model, dtype, mode)
    }
}

/// Losses, norms and weights, as bits; what crossed in the last step.
#[derive(Debug, PartialEq)]
struct Run {
    steps: Vec<(usize, u32, u32)>,
    weights: Vec<u32>,
}

fn bits(outcome: &StepOutcome) -> (usize, u32, u32) {
    (
        outcome.step,
        outcome.loss.to_bits(),
        outcome.grad_norm.to_bits(),
    )
}

/// Asks for steps without waiting for each, and sees every outcome.
fn run(
    session: &mut Session,
    settings: &Settings,
    steps: usize,
    mut see: impl FnMut(&StepOutcome),
) -> Run {
    let mut outcomes = Vec::new();
    for step in 0..steps {
        session.start_step(&step_batch(settings, step)).unwrap();
        outcomes.extend(session.take_finished());
    }
    outcomes.extend(session.finish_step().unwrap());
    outcomes.iter().for_each(&mut see);
    Run {
        steps: outcomes.iter().map(bits).collect(),
        weights: parameters(session)
            .concat()
            .into_iter()
            .map(f32::to_bits)
            .collect(),
    }
}

fn assert_offload_changes_nothing_but_memory(
    name: &str,
    resident: &Settings,
    offloaded: &Settings,
) {
    let name = format!("{name} {:?}", offloaded.homes);
    let expected = run(&mut session(resident), resident, STEPS, |_| {});
    let planned = plan(offloaded);
    assert!(planned.host_pinned_bytes > 0, "{name}");
    let mut crossed = Vec::new();
    let actual = run(&mut session(offloaded), offloaded, STEPS, |outcome| {
        assert_as_planned(&name, &planned, outcome);
        crossed.push(outcome.traffic);
    });
    assert!(actual == expected, "{name}");
    assert_eq!(crossed, [crossing(&planned); STEPS], "{name}");
    assert!(planned.d2h_bytes > plan(resident).d2h_bytes, "{name}");
}

#[test]
fn states_of_every_form_come_and_go_without_changing_a_bit() {
    let [_, _, (name, tied), _] = variants(3);
    side_by_side(FORMS, |form| {
        let resident = with_states(tied.clone(), form, "none");
        for window in [Window::Forward, Window::End] {
            let offloaded = Settings {
                homes: offload(window, 1.0),
                ..resident.clone()
            };
            assert_offload_changes_nothing_but_memory(
                &format!("{name} {form:?}"),
                &resident,
                &offloaded,
            );
        }
    });
}

#[test]
fn models_modes_and_fractions_go_together() {
    let variants = variants(3);
    side_by_side(MODES.into_iter().enumerate(), |(index, mode)| {
        let (name, model) = &variants[index % variants.len()];
        let resident = with_states(model.clone(), FORMS[3], mode);
        let fraction = [0.01, 0.5, 1.0][index / variants.len() % 3];
        let offloaded = Settings {
            homes: offload(Window::Forward, fraction),
            ..resident.clone()
        };
        assert_offload_changes_nothing_but_memory(&format!("{name} {mode}"), &resident, &offloaded);
    });
}

#[test]
fn states_and_activations_go_together() {
    let [(_, model), ..] = variants(3);
    let modes = [
        ("full", "block_input"),
        ("mlp_act", "core_attn,qkv"),
        ("none", "mlp,attn_out"),
    ];
    side_by_side(modes, |(mode, labels)| {
        let resident = with_states(model.clone(), FORMS[3], mode);
        let policy = resident
            .policy
            .clone()
            .offload(&OffloadLabels::parse(labels).unwrap())
            .unwrap();
        for window in [Window::Forward, Window::End] {
            let offloaded = Settings {
                policy: policy.clone(),
                homes: offload(window, 1.0),
                accum: 3,
                ..resident.clone()
            };
            let resident = Settings {
                accum: 3,
                ..resident.clone()
            };
            assert_offload_changes_nothing_but_memory(
                &format!("{mode} {labels}"),
                &resident,
                &offloaded,
            );
        }
    });
}

/// As a checkpoint holds them.
fn save_states(session: &Session, folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    let state = session.state();
    write_tensors(&Disk, folder, "optimizer", &state.optimizer(), u64::MAX).unwrap();
}

fn states(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join("optimizer.safetensors")).unwrap()
}

#[test]
fn saved_states_are_those_of_a_run_without_offload() {
    let [_, _, (_, tied), _] = variants(3);
    let resident = with_states(tied, FORMS[3], "none");
    let offloaded = Settings {
        homes: offload(Window::Forward, 1.0),
        ..resident.clone()
    };
    let folder = tempfile::tempdir().unwrap();
    let saved = |settings: &Settings, name: &str| {
        let mut session = session(settings);
        run(&mut session, settings, 3, |_| {});
        let path = folder.path().join(name);
        save_states(&session, &path);
        path
    };
    let folders = [saved(&resident, "resident"), saved(&offloaded, "offloaded")];
    let bytes = folders.each_ref().map(|folder| states(folder));
    assert!(bytes[0] == bytes[1]);
    let mut restored = session(&offloaded);
    restored.import_optimizer(&folders[0]).unwrap();
    let again = folder.path().join("again");
    save_states(&restored, &again);
    assert!(states(&again) == bytes[0]);
}

/// Two blocks and few tokens: a schedule in milliseconds.
fn small(window: Window) -> Settings {
    let [_, _, (_, model), _] = variants(2);
    let model = ModelConfig {
        ffn: 60,
        vocab: 40,
        ..model
    };
    Settings {
        homes: Homes {
            chunk_bytes: 8_000,
            ..offload(window, 1.0)
        },
        seq: 9,
        accum: 1,
        micro_batch: 1,
        ..with_states(model, FORMS[0], "none")
    }
}

#[test]
fn any_schedule_of_the_queues_gives_the_same_bits() {
    for window in [Window::Forward, Window::End] {
        let settings = small(window);
        let resident = Settings {
            homes: Homes::default(),
            ..settings.clone()
        };
        let expected = run(&mut session(&resident), &resident, STEPS, |_| {});
        for seed in 0..50 {
            let (mut session, _) = on_schedule(&settings, seed, None);
            let actual = run(&mut session, &settings, STEPS, |_| {});
            assert!(actual == expected, "{window:?}, seed {seed}");
        }
    }
}

#[test]
fn every_wait_is_needed() {
    let settings = small(Window::Forward);
    let expected = run(&mut session(&settings), &settings, STEPS, |_| {});
    let (mut session, reasons) = on_schedule(&settings, 0, None);
    assert!(run(&mut session, &settings, STEPS, |_| {}) == expected);
    let reasons: Vec<&'static str> = reasons.counts().keys().copied().collect();
    assert_eq!(reasons.len(), 5, "{reasons:?}");
    for reason in reasons {
        let is_wrong = |seed: u64| {
            let (mut session, _) = on_schedule(&settings, seed, Some(reason));
            run(&mut session, &settings, STEPS, |_| {}) != expected
        };
        assert!((0..20).any(is_wrong), "nothing needs: {reason}");
    }
}

/// Both offloads share the copy queues.
#[test]
fn any_schedule_of_both_offloads_gives_the_same_bits() {
    let settings = small(Window::Forward);
    let labels = OffloadLabels::parse("mlp,block_input").unwrap();
    let both = Settings {
        policy: settings.policy.clone().offload(&labels).unwrap(),
        ..settings.clone()
    };
    let expected = run(&mut session(&settings), &settings, STEPS, |_| {});
    for seed in 0..30 {
        let (mut session, reasons) = on_schedule(&both, seed, None);
        assert!(
            run(&mut session, &both, STEPS, |_| {}) == expected,
            "seed {seed}"
        );
        assert_eq!(reasons.counts().len(), 9);
    }
}

/// Refuses each lease of the second step in turn, while the first one's update is pending: the update is finished all the
/// same, and later steps are those of a run without the refused one.
#[test]
fn a_refused_lease_loses_no_pending_update() {
    let settings = small(Window::Forward);
    let expected = run(&mut session(&settings), &settings, 3, |_| {});
    let batch = |step| step_batch(&settings, step);
    for lease in 0.. {
        let (mut session, _) = on_schedule(&settings, lease as u64, None);
        session.start_step(&batch(0)).unwrap();
        session.memory().refuse_after(lease);
        let outcome = session.start_step(&batch(1));
        if outcome.is_ok() {
            assert!(lease > 20, "{lease} leases");
            break;
        }
        let mut steps = vec![bits(&session.finish_step().unwrap().unwrap())];
        for step in 1..3 {
            session.start_step(&batch(step)).unwrap();
            steps.extend(session.take_finished().as_ref().map(bits));
        }
        steps.extend(session.finish_step().unwrap().as_ref().map(bits));
        assert_eq!(steps, expected.steps, "lease {lease}");
    }
}
