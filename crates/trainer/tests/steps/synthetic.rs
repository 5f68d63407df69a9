//! A model of four kinds of block under 14 labels, with frozen matrices and buffers, tables of whole numbers, rows for each token
//! and choice, and a stage with a loss of its own: wherever what it has lives, under every policy and among any ranks it has the
//! bits of a run that keeps everything on the device, and memory and traffic are what was planned.

#[path = "../../../model/tests/it/common/synthetic.rs"]
mod architecture;

use crate::common::elsewhere::{OPTIMIZERS, all_pinned, forms, run, with_form, with_optimizer};
use crate::common::ranks::{Together, each, on_cpu, ranks, together};
use crate::common::side_by_side::side_by_side;
use crate::common::{assert_as_planned, odd_model, parameters, plan, policies, session};
use architecture::{LABELS, architecture};
use memory::{DType, Home, Homes, Role};
use model::{Attention, Policy};
use optim::OptimizerKind;
use settings::Settings;
use std::collections::BTreeMap;
use std::path::Path;
use units::Zero;

const LAYERS: usize = 5;

const STEPS: usize = 2;

/// Matrices of some blocks: others of the kind are trained, so that every label still has something to recompute or offload.
const FROZEN: [&str; 4] = [
    "layers.0.down_proj.*",
    "layers.1.o_proj.*",
    "*.2.experts_up.*",
    "*.3.gate.weight",
];

/// f32; bf16 with remainders; bf16 with masters and 8-bit moments. The routers' matrices are f32 in all.
const FORMS: [usize; 3] = [0, 7, 9];

/// Adafactor has a master, without which it has no states to move.
fn keeps_everything(kind: OptimizerKind, form: usize, accum: usize) -> Settings {
    let form = match kind {
        OptimizerKind::Adafactor => 4,
        OptimizerKind::AdamW | OptimizerKind::Muon => FORMS[form],
    };
    let settings = with_form(odd_model(LAYERS), forms()[form], "none", DType::F32);
    let settings = with_optimizer(settings, kind);
    Settings {
        structure: architecture,
        freeze: FROZEN.map(String::from).to_vec(),
        policy: Policy::keep_all_of(LABELS, LAYERS),
        micro_batch: 1,
        seq: 21,
        accum,
        ..settings
    }
}

/// Weights, gradients and states elsewhere, each alone and all together.
fn homes(folder: &Path) -> [Homes; 7] {
    let here = Homes {
        chunk_bytes: 20_000,
        ..Homes::default()
    };
    let disk = Home::Disk(folder.into());
    let with = |weights, gradients, states| Homes {
        weights,
        gradients,
        states,
        ..here.clone()
    };
    use Home::{Device, Pinned, Released};
    [
        with(Pinned, Device, Home::Device),
        with(Device, Pinned, Home::Device),
        with(Device, Released, Home::Device),
        with(Device, Device, Home::Pinned),
        with(Device, Device, disk.clone()),
        all_pinned(),
        Homes {
            unit_slots: 1,
            ..with(Pinned, Released, disk)
        },
    ]
}

/// With gradients given back as soon as they are used, a step has one micro-batch and no clipping.
fn fit(settings: &mut Settings) {
    if settings.homes.gradients == Home::Released {
        settings.accum = 1;
        settings.optimizer.clip_norm = f64::INFINITY;
    }
}

#[test]
fn homes_and_policies_change_nothing_but_memory() {
    let all = policies(LABELS, LAYERS);
    // Every home under some policies, every policy in two homes.
    let runs = (0..all.len()).flat_map(|policy| [(policy % 7, policy), ((policy + 3) % 7, policy)]);
    side_by_side(runs, |(home, number)| {
        let folder = tempfile::tempdir().unwrap();
        let (text, policy) = &all[number];
        let attention = [Attention::Eager, Attention::Flash][home % 2];
        let mut moved = Settings {
            attention,
            policy: policy.clone(),
            homes: homes(folder.path())[home].clone(),
            ..keeps_everything(OPTIMIZERS[(home + number) % 3], home % 3, 2)
        };
        fit(&mut moved);
        let kept = Settings {
            policy: Policy::keep_all_of(LABELS, LAYERS),
            homes: Homes::default(),
            ..moved.clone()
        };
        let name = format!("{:?}, {text}", moved.homes);
        let planned = plan(&moved);
        let here = plan(&Settings {
            homes: Homes::default(),
            ..moved.clone()
        });
        assert!(planned.persistent_bytes < here.persistent_bytes, "{name}");
        let mut replays = [0; 2];
        let expected = run(&mut session(&kept), &kept, 0..STEPS, |outcome| {
            replays[0] += outcome.replayed.total();
        });
        let actual = run(&mut session(&moved), &moved, 0..STEPS, |outcome| {
            assert_as_planned(&name, &planned, outcome);
            replays[1] += outcome.replayed.total();
        });
        let is_offloaded = here.d2h_bytes > plan(&kept).d2h_bytes;
        assert_eq!(replays[0], 0, "{name}");
        assert!(is_offloaded || replays[1] > 0, "{name}");
        assert_eq!(actual.steps, expected.steps, "{name}");
        assert!(actual.state == expected.state, "{name}");
    });
}

#[test]
fn what_is_frozen_and_buffers_stay_as_they_are() {
    let settings = keeps_everything(OptimizerKind::AdamW, 0, 2);
    let mut session = session(&settings);
    let initial = parameters(&session);
    let entries = session.model().layout().entries().to_vec();
    run(&mut session, &settings, 0..STEPS, |_| {});
    let trained = parameters(&session);
    let mut seen = BTreeMap::new();
    for (index, entry) in entries.iter().enumerate() {
        *seen.entry(format!("{:?}", entry.role)).or_insert(0) += 1;
        let changed = initial[index] != trained[index];
        assert_eq!(changed, entry.role == Role::Trained, "{}", entry.name);
        let states = session.states(index).unwrap();
        assert_eq!(!states.is_empty(), changed, "{}", entry.name);
    }
    // Of five layers two have experts.
    assert_eq!((seen["Frozen"], seen["Buffer"]), (FROZEN.len(), 2));
}

/// A router's matrix keeps bits that bf16 does not have, in weights and through an update.
#[test]
fn a_matrix_may_be_f32_where_the_model_computes_in_bf16() {
    let settings = keeps_everything(OptimizerKind::AdamW, 2, 2);
    let mut session = session(&settings);
    run(&mut session, &settings, 0..STEPS, |_| {});
    let trained = parameters(&session);
    let entries = session.model().layout().entries().iter();
    for (entry, values) in entries.zip(trained) {
        let is_wide = values.iter().any(|value| value.to_bits() & 0xffff != 0);
        let is_f32 = entry.name.ends_with("gate.weight") || entry.role == Role::Buffer;
        assert_eq!(is_wide, is_f32, "{}", entry.name);
    }
}

#[test]
fn the_loss_depends_on_buffers() {
    let settings = keeps_everything(OptimizerKind::AdamW, 0, 2);
    let loss = |change: f32| {
        let mut session = session(&settings);
        let layout = session.model().layout().clone();
        let index = layout.find("layers.2.gate.correction").unwrap();
        let mut values = session.parameter(index).unwrap();
        assert!(values.iter().any(|value| *value != 0.0));
        values[0] += change;
        let offset = layout.entries()[index].offset;
        session.incoming().set_values(offset, &values).unwrap();
        run(&mut session, &settings, 0..1, |_| {}).steps[0].1
    };
    assert_ne!(loss(0.0), loss(1.0));
}

fn of_ranks(name: &str, settings: &Settings) -> Together {
    let ranks = each(name, settings, STEPS, on_cpu);
    assert!(
        ranks
            .iter()
            .all(|rank| rank.counted_bytes == rank.sent_bytes)
    );
    assert_eq!(ranks[0].sent_bytes > 0, ranks.len() > 1, "{name}");
    together(&ranks)
}

#[test]
fn ranks_change_nothing_but_memory() {
    let all = policies(LABELS, LAYERS);
    let stages = Zero::ALL.into_iter().enumerate();
    let runs = stages.flat_map(|(at, zero)| (0..3).map(move |home| (at, zero, home)));
    side_by_side(runs, |(at, zero, home)| {
        let folder = tempfile::tempdir().unwrap();
        let alone = Settings {
            ranks: Some(ranks(1, Zero::Replicated)),
            ..keeps_everything(OPTIMIZERS[(at + home) % 3], home, 4)
        };
        let (text, policy) = &all[(7 * at + 5 * home) % all.len()];
        let divided = Settings {
            accum: 2,
            policy: policy.clone(),
            ranks: Some(ranks(2, zero)),
            homes: Homes {
                states: match home {
                    0 => Home::Device,
                    1 => Home::Pinned,
                    _ => Home::Disk(folder.path().into()),
                },
                weights: match zero == Zero::Weights && home == 2 {
                    true => Home::Pinned,
                    false => Home::Device,
                },
                gradients: Home::Device,
                window: memory::Window::End,
                ..all_pinned()
            },
            ..alone.clone()
        };
        let name = format!("{zero:?}, {text}, {:?}", divided.homes);
        let undivided = Settings {
            ranks: Some(ranks(2, Zero::Replicated)),
            homes: Homes::default(),
            ..divided.clone()
        };
        let persistent = [&undivided, &divided].map(|settings| plan(settings).persistent_bytes);
        let has_less = home > 0 || zero != Zero::Replicated;
        assert_eq!(persistent[1] < persistent[0], has_less, "{name}");
        let (expected, actual) = (of_ranks(&name, &alone), of_ranks(&name, &divided));
        assert_eq!(actual.steps, expected.steps, "{name}");
        assert!(actual.state == expected.state, "{name}");
    });
}
