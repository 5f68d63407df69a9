//! Optimizers that update whole tensors: the same bits wherever weights, gradients and states live.

use crate::common::{Formats, Training, disk, homes, layout, unclipped};
use memory::{DType, Home, Homes};
use optim::{Hyperparameters, MasterFormat, MomentFormat, OptimizerKind};

/// Every home that an update can have.
fn all_homes() -> [Homes; 4] {
    [
        homes(Home::Pinned),
        Homes {
            fraction: 0.9,
            ..homes(Home::Pinned)
        },
        homes(disk()),
        Homes {
            weights: Home::Pinned,
            gradients: Home::Pinned,
            ..homes(Home::Pinned)
        },
    ]
}

/// An optimizer that updates whole tensors, and formats of its states.
type Case = (OptimizerKind, Formats);

const CASES: [Case; 8] = [
    (
        OptimizerKind::Muon,
        (DType::F32, MomentFormat::F32, MasterFormat::None),
    ),
    (
        OptimizerKind::Muon,
        (
            DType::BF16,
            MomentFormat::Quantised,
            MasterFormat::Remainder,
        ),
    ),
    (
        OptimizerKind::Muon,
        (DType::BF16, MomentFormat::Bf16, MasterFormat::None),
    ),
    (
        OptimizerKind::Adafactor,
        (DType::F32, MomentFormat::F32, MasterFormat::None),
    ),
    (
        OptimizerKind::Adafactor,
        (DType::BF16, MomentFormat::F32, MasterFormat::Remainder),
    ),
    (
        OptimizerKind::Adafactor,
        (DType::BF16, MomentFormat::F32, MasterFormat::F32),
    ),
    (
        OptimizerKind::Muon,
        (DType::BF16, MomentFormat::F32, MasterFormat::RemainderByte),
    ),
    (
        OptimizerKind::Adafactor,
        (DType::BF16, MomentFormat::F32, MasterFormat::RemainderByte),
    ),
];

fn by(kind: OptimizerKind) -> Hyperparameters {
    Hyperparameters {
        kind,
        ..Hyperparameters::default()
    }
}

/// The first case of each optimizer.
fn one_of_each() -> [Case; 2] {
    [CASES[0], CASES[3]]
}

#[test]
fn weights_and_states_are_the_same_wherever_they_live() {
    for (kind, formats) in CASES {
        let mut here = Training::by(by(kind), formats, &Homes::default());
        here.steps(1..=3);
        let adamw = {
            let mut adamw = Training::new(formats);
            adamw.steps(1..=3);
            adamw.weights()
        };
        assert!(here.weights() != adamw, "{kind} is another optimizer");
        for home in all_homes() {
            let mut there = Training::by(by(kind), formats, &home);
            there.steps(1..=3);
            assert!(
                there.weights() == here.weights(),
                "{kind} {formats:?} {home:?}"
            );
            assert!(there.save() == here.save(), "{kind} {formats:?} {home:?}");
        }
    }
}

#[test]
fn released_gradients_give_the_bits_of_kept_ones() {
    for (kind, formats) in CASES {
        let gradients = [Home::Device, Home::Released];
        let [mut kept, mut gone] = gradients.map(|gradients| {
            let homes = Homes {
                gradients,
                ..homes(Home::Device)
            };
            Training::by(unclipped(by(kind)), formats, &homes)
        });
        kept.steps(1..=3);
        gone.steps(1..=3);
        assert!(kept.weights() == gone.weights(), "{kind} {formats:?}");
    }
}

#[test]
fn queues_may_run_in_any_order_that_the_waits_allow() {
    for (kind, formats) in one_of_each() {
        for home in all_homes() {
            let mut here = Training::by(by(kind), formats, &home);
            here.steps(1..=2);
            for seed in 0..4 {
                let schedule = (seed, None);
                let (mut there, waits) = Training::scheduled_by(schedule, by(kind), formats, &home);
                there.steps(1..=2);
                assert!(
                    there.weights() == here.weights(),
                    "{kind} seed {seed} {home:?}"
                );
                assert!(waits.unordered().is_empty(), "{:?}", waits.unordered());
            }
        }
    }
}

#[test]
fn a_step_that_is_not_finite_changes_nothing() {
    for (kind, formats) in one_of_each() {
        let mut training = Training::by(by(kind), formats, &Homes::default());
        training.steps(1..=2);
        let (weights, states) = (training.weights(), training.save());
        training.spoil(layout().entries()[2].offset);
        training.steps(3..=3);
        assert!(
            training.weights() == weights && training.save() == states,
            "{kind}"
        );
    }
}

#[test]
fn saved_states_go_on_elsewhere() {
    for (kind, formats) in one_of_each() {
        let mut first = Training::by(by(kind), formats, &Homes::default());
        first.steps(1..=2);
        let saved = first.save();
        for home in all_homes() {
            let mut second = Training::by(by(kind), formats, &home);
            second.restore(&first, &saved).unwrap();
            second.steps(3..=4);
            let mut whole = Training::by(by(kind), formats, &Homes::default());
            whole.steps(1..=4);
            assert!(second.weights() == whole.weights(), "{kind} {home:?}");
        }
    }
}
