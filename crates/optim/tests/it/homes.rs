//! Weights, gradients and states that live elsewhere than on the device: the same bits, wherever that is, under any order of
//! the queues that their events allow.

use crate::common::{Formats, Saved, Training, disk, homes, trained, unclipped};
use memory::{DType, Home, Homes};
use optim::{Hyperparameters, MasterFormat, MomentFormat};
use std::collections::{BTreeMap, BTreeSet};

/// States of all formats: with f32 weights, and with bf16 weights and each kind of master.
const FORMS: [Formats; 6] = [
    (DType::F32, MomentFormat::F32, MasterFormat::None),
    (DType::F32, MomentFormat::Quantised, MasterFormat::None),
    (DType::BF16, MomentFormat::F32, MasterFormat::F32),
    (
        DType::BF16,
        MomentFormat::Quantised,
        MasterFormat::Remainder,
    ),
    (DType::BF16, MomentFormat::Bf16, MasterFormat::None),
    (
        DType::BF16,
        MomentFormat::Quantised,
        MasterFormat::RemainderByte,
    ),
];

/// All combinations of homes with gradients in one of these, but everything on the device.
fn all_homes(gradients: &[Home]) -> Vec<Homes> {
    let mut all = Vec::new();
    for weights in [Home::Device, Home::Pinned] {
        for gradients in gradients {
            for (states, fraction) in [
                (Home::Device, 1.0),
                (Home::Pinned, 1.0),
                (disk(), 1.0),
                // The states of the embedding stay on the device.
                (Home::Pinned, 0.9),
                (disk(), 0.9),
            ] {
                all.push(Homes {
                    weights: weights.clone(),
                    gradients: gradients.clone(),
                    fraction,
                    ..homes(states)
                });
            }
        }
    }
    all
}

/// Weights and states after some steps.
fn outcome(mut training: Training, steps: usize) -> (Vec<u32>, Saved) {
    training.steps(1..=steps);
    (training.weights(), training.save())
}

#[test]
fn everything_has_the_same_bits_wherever_it_lives() {
    for form in FORMS {
        let expected = outcome(Training::new(form), 3);
        assert!(expected != outcome(Training::new(form), 2));
        for homes in all_homes(&[Home::Device, Home::Pinned]) {
            let actual = outcome(Training::elsewhere(form, &homes), 3);
            assert!(actual == expected, "{form:?} {homes:?}");
        }
    }
}

/// With everything on the device.
fn resident(form: Formats, is_unclipped: bool) -> Training {
    let default = Hyperparameters::default();
    let hyperparameters = match is_unclipped {
        true => unclipped(default),
        false => default,
    };
    Training::by(hyperparameters, form, &Homes::default())
}

#[test]
fn released_gradients_make_the_update_of_a_step_without_clipping() {
    for form in FORMS {
        let expected = outcome(resident(form, true), 3);
        for homes in all_homes(&[Home::Released]) {
            let actual = outcome(Training::elsewhere(form, &homes), 3);
            assert!(actual == expected, "{form:?} {homes:?}");
        }
    }
}

/// A gradient that is not finite spares its own part, and vectors; a loss that is not spares everything.
#[test]
fn parts_whose_gradients_are_not_finite_are_left_alone() {
    let homes = Homes {
        weights: Home::Pinned,
        gradients: Home::Released,
        ..homes(disk())
    };
    let mut training = Training::elsewhere(FORMS[3], &homes);
    training.steps([1]);
    let layout = training.layout.clone();
    let (before, states) = (training.weights(), training.save());
    let large = layout.find("large").unwrap();
    training.spoil(layout.entries()[large].offset + 7);
    training.steps([2]);
    let (weights, saved) = (training.weights(), training.save());
    for entry in layout.entries() {
        let is_same = before[entry.range()] == weights[entry.range()];
        let mut own = states.iter().filter(|(name, _)| {
            let parameter = name.split('.').next();
            parameter == Some(&entry.name)
        });
        let is_spared = !["embed", "head"].contains(&entry.name.as_str());
        assert_eq!(is_same, is_spared, "{}", entry.name);
        let are_same = own.all(|(name, state)| saved[name] == *state);
        assert_eq!(are_same, is_spared, "{}", entry.name);
    }
    training.set_loss(f32::NAN);
    training.steps([3]);
    assert!((training.weights(), training.save()) == (weights, saved));
}

#[test]
fn states_are_restored_wherever_they_live() {
    for form in FORMS {
        let mut first = trained(form);
        let saved = first.save();
        let elsewhere = all_homes(&[Home::Pinned]);
        let mut all: Vec<Training> = elsewhere
            .iter()
            .map(|homes| {
                let mut training = Training::elsewhere(form, homes);
                assert!(training.save() != saved);
                training.restore(&first, &saved).unwrap();
                assert!(training.save() == saved, "{form:?} {homes:?}");
                training
            })
            .collect();
        first.steps([4]);
        let expected = (first.weights(), first.save());
        assert!(expected.1 != saved);
        for (training, homes) in all.iter_mut().zip(elsewhere) {
            training.steps([4]);
            let actual = (training.weights(), training.save());
            assert!(actual == expected, "{form:?} {homes:?}");
        }
    }
}

/// Between a step that was broken off, whose states were on their way, and the next one.
#[test]
fn states_can_be_read_while_the_first_have_been_fetched() {
    for states in [Home::Pinned, disk()] {
        let mut first = trained(FORMS[3]);
        let mut second = Training::elsewhere(FORMS[3], &homes(states));
        second.steps(1..=3);
        second.optimizer.before_backward(&*second.kernels).unwrap();
        assert!(second.save() == first.save());
        first.steps([4]);
        second.steps([4]);
        assert!(second.save() == first.save());
        assert!(second.weights.padding_is_zero());
    }
}

/// Homes between which all waits are needed.
fn waiting() -> [Homes; 3] {
    let gradients = Homes {
        gradients: Home::Pinned,
        ..homes(disk())
    };
    let all = Homes {
        weights: Home::Pinned,
        ..gradients.clone()
    };
    let released = Homes {
        gradients: Home::Released,
        ..all.clone()
    };
    [gradients, all, released]
}

#[test]
fn any_schedule_of_the_queues_gives_the_same_bits() {
    for homes in waiting() {
        let is_released = homes.gradients == Home::Released;
        let expected = outcome(resident(FORMS[0], is_released), 3);
        for seed in 0..8 {
            let (training, waits) = Training::scheduled((seed, None), FORMS[0], &homes);
            assert!(outcome(training, 3) == expected, "{homes:?} seed {seed}");
            assert_eq!(waits.unordered(), BTreeSet::new(), "{homes:?}");
        }
    }
}

/// Without the waits for one reason, work that touches the same bytes is unordered somewhere, whatever the reason.
#[test]
fn every_wait_is_needed_somewhere() {
    let mut needed: BTreeMap<&'static str, bool> = BTreeMap::new();
    for homes in waiting() {
        let (training, waits) = Training::scheduled((0, None), FORMS[0], &homes);
        outcome(training, 3);
        for reason in waits.counts().into_keys() {
            let (training, waits) = Training::scheduled((0, Some(reason)), FORMS[0], &homes);
            outcome(training, 3);
            *needed.entry(reason).or_default() |= !waits.unordered().is_empty();
        }
    }
    assert!(needed.values().all(|is_needed| *is_needed), "{needed:?}");
    // Six of chunks, three of the disk, five of units.
    assert_eq!(needed.len(), 14, "{needed:?}");
}

#[test]
fn arenas_and_the_file_are_as_large_as_what_they_hold() {
    let training = Training::elsewhere(FORMS[0], &homes(disk()));
    let elements = training.layout.matrices().len() as u64;
    let bytes = training.optimizer.disk_bytes().unwrap();
    assert!((8 * elements..9 * elements + 16 * 4096).contains(&bytes));
    let [("disk_staging", staging)] = training.optimizer.host_arenas()[..] else {
        panic!("states on a disk need nothing else")
    };
    assert!(staging <= 7 * 16_384 && staging < bytes);
    let training = Training::elsewhere(FORMS[0], &homes(Home::Pinned));
    assert_eq!(training.optimizer.disk_bytes(), None);
    let expected = [("offloaded_states", 8 * elements)];
    assert_eq!(training.optimizer.host_arenas(), expected);
    let slots = training.optimizer.arenas().pop();
    assert!(slots.is_some_and(|(name, bytes)| name == "offload_slots" && bytes <= 2 * 16_384));
    let whole = Training::new(FORMS[0]);
    assert!(whole.optimizer.host_arenas().is_empty());
    assert!(
        whole
            .optimizer
            .arenas()
            .iter()
            .all(|(name, _)| *name != "offload_slots")
    );
}
