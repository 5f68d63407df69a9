//! Weights, gradients and states elsewhere, on queues that run when a seeded scheduler says: any order that the events allow
//! gives the same bits, none of the waits can be left out, and a lease that is refused disturbs nothing.

use crate::common::elsewhere::{Bits, all_pinned, bits, forms, resident, run, state, with_form};
use crate::common::side_by_side::side_by_side;
use crate::common::{assert_as_planned, on_schedule, plan, session, step_batch, variants};
use memory::{DType, Home, Homes, Window};
use model::{ModelConfig, OffloadLabels};
use optim::Hyperparameters;
use session::{Session, SessionError};
use settings::Settings;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use tempfile::TempDir;

const STEPS: usize = 4;

/// Schedules of each run.
const SEEDS: u64 = 6;

/// What is elsewhere, what is recomputed, activations that are offloaded, and micro-batches.
struct Way {
    name: &'static str,
    homes: Homes,
    mode: &'static str,
    labels: &'static str,
    accum: usize,
}

fn ways(folder: &TempDir) -> Vec<Way> {
    let small = Homes {
        chunk_bytes: 8_000,
        ..all_pinned()
    };
    let way = |name, homes, mode, labels, accum| Way {
        name,
        homes,
        mode,
        labels,
        accum,
    };
    let nothing = Homes {
        states: Home::Device,
        weights: Home::Device,
        gradients: Home::Device,
        ..small.clone()
    };
    vec![
        way("everything", small.clone(), "full", "block_input", 2),
        way(
            "everything, at the end of a step",
            Homes {
                window: Window::End,
                unit_slots: 1,
                ..small.clone()
            },
            "none",
            "",
            2,
        ),
        way(
            "weights",
            Homes {
                weights: Home::Pinned,
                unit_slots: 3,
                ..nothing.clone()
            },
            "full:uniform:2",
            "",
            1,
        ),
        way(
            "gradients",
            Homes {
                gradients: Home::Pinned,
                ..nothing.clone()
            },
            "none",
            "mlp",
            3,
        ),
        way(
            "states and released gradients",
            Homes {
                gradients: Home::Released,
                ..small.clone()
            },
            "full",
            "",
            1,
        ),
        way(
            "states on a disk",
            Homes {
                states: Home::Disk(folder.path().to_owned()),
                ..small
            },
            "full",
            "",
            2,
        ),
    ]
}

/// Two blocks and few tokens: a schedule in milliseconds.
fn settings(way: &Way) -> Settings {
    let [_, _, (_, model), _] = variants(2);
    let model = ModelConfig {
        ffn: 60,
        vocab: 40,
        ..model
    };
    let settings = with_form(model, forms()[0], way.mode, DType::F32);
    let labels = match way.labels {
        "" => OffloadLabels::default(),
        labels => OffloadLabels::parse(labels).unwrap(),
    };
    let is_released = way.homes.gradients == Home::Released;
    Settings {
        policy: settings.policy.clone().offload(&labels).unwrap(),
        homes: way.homes.clone(),
        optimizer: Hyperparameters {
            clip_norm: match is_released {
                true => f64::INFINITY,
                false => settings.optimizer.clip_norm,
            },
            ..settings.optimizer
        },
        seq: 9,
        accum: way.accum,
        micro_batch: 1,
        ..settings
    }
}

fn expected(settings: &Settings) -> Bits {
    let resident = resident(settings);
    let [here, elsewhere] = [&resident, settings].map(plan);
    assert!(here.arenas != elsewhere.arenas, "the two sides differ");
    run(&mut session(&resident), &resident, 0..STEPS, |_| {})
}

#[test]
fn any_schedule_gives_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    for way in ways(&folder) {
        let settings = settings(&way);
        let (planned, expected) = (plan(&settings), expected(&settings));
        for seed in 0..SEEDS {
            let (mut session, waits) = on_schedule(&settings, seed, None);
            let actual = run(&mut session, &settings, 0..STEPS, |outcome| {
                assert_as_planned(way.name, &planned, outcome);
            });
            assert_eq!(waits.unordered(), BTreeSet::new(), "{}", way.name);
            assert_eq!(actual.steps, expected.steps, "{}, seed {seed}", way.name);
            assert!(actual.state == expected.state, "{}, seed {seed}", way.name);
        }
    }
}

/// Whatever waited in some run, for whatever reason: without the waits for it, work of some run that touches the same
/// bytes is unordered.
#[test]
fn every_wait_is_needed() {
    let folder = tempfile::tempdir().unwrap();
    let ways = ways(&folder);
    let mut waiting: BTreeMap<&'static str, Vec<Settings>> = BTreeMap::new();
    for way in &ways {
        let settings = settings(way);
        let (mut session, waits) = on_schedule(&settings, 0, None);
        run(&mut session, &settings, 0..STEPS, |_| {});
        for reason in waits.counts().into_keys() {
            waiting.entry(reason).or_default().push(settings.clone());
        }
    }
    assert_eq!(waiting.len(), 19, "{:?}", waiting.keys());
    for (reason, runs) in waiting {
        let is_unordered = |settings: &Settings| {
            let (mut session, waits) = on_schedule(settings, 0, Some(reason));
            let run = || run(&mut session, settings, 0..STEPS, |_| {});
            // Wrong numbers may end the run.
            let _ = catch_unwind(AssertUnwindSafe(run));
            !waits.unordered().is_empty()
        };
        assert!(runs.iter().any(is_unordered), "nothing needs: {reason}");
    }
}

/// Steps that are known to be done, and the one that is not.
fn finish(session: &mut Session, told: &mut Vec<(usize, u32, u32)>) {
    told.extend(session.take_finished().as_ref().map(bits));
    told.extend(session.finish_step().unwrap().as_ref().map(bits));
}

/// Refuses each lease of the second step in turn, while units are on their way and the update of the first step may be
/// pending: weights and states are those after the first step, and the second one, made again, has the bits of one that
/// nothing disturbed.
#[test]
fn a_refused_lease_leaves_weights_and_states_intact() {
    let folder = tempfile::tempdir().unwrap();
    let unreleased = |way: &Way| way.homes.gradients != Home::Released;
    let refused = side_by_side(ways(&folder).into_iter().filter(unreleased), |way| {
        let mut refused = BTreeSet::new();
        let settings = settings(&way);
        let first = run(&mut session(&settings), &settings, 0..1, |_| {});
        let both = run(&mut session(&settings), &settings, 0..2, |_| {});
        assert!(first.state != both.state);
        for lease in 0.. {
            let (mut session, _) = on_schedule(&settings, lease as u64, None);
            let memory = session.memory().clone();
            session.start_step(&step_batch(&settings, 0)).unwrap();
            let live = memory.live_bytes();
            memory.refuse_after(lease);
            let mut told = Vec::new();
            match session.start_step(&step_batch(&settings, 1)) {
                Ok(()) => break,
                Err(SessionError::OutOfMemory(error)) => {
                    assert_eq!(memory.live_bytes(), live, "{}, lease {lease}", way.name);
                    refused.insert((error.name, error.place.phase.name()));
                }
                Err(failure) => panic!("{}, lease {lease}: {failure}", way.name),
            }
            finish(&mut session, &mut told);
            if session.progress().0 == 2 {
                // Refused when it was being updated already: that is not left half done.
                assert_eq!(way.homes.window, Window::End);
                assert!(state(&session) == both.state, "{}, lease {lease}", way.name);
                continue;
            }
            assert_eq!(told, first.steps, "{}, lease {lease}", way.name);
            assert!(
                state(&session) == first.state,
                "{}, lease {lease}",
                way.name
            );
            session.start_step(&step_batch(&settings, 1)).unwrap();
            finish(&mut session, &mut told);
            assert_eq!(told, both.steps, "{}, lease {lease}", way.name);
            assert!(state(&session) == both.state, "{}, lease {lease}", way.name);
        }
        refused
    });
    let refused: BTreeSet<_> = refused.into_iter().flatten().collect();
    for leased in [
        ("unit_weights", "forward"),
        ("unit_weights", "backward"),
        ("unit_weights", "optimizer"),
        ("unit_gradients", "backward"),
    ] {
        assert!(refused.contains(&leased), "{leased:?}: {refused:?}");
    }
}
