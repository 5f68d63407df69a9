//! Steps on a device whose queues run when a seeded scheduler says: the host runs ahead, and results arrive late.

use crate::common::{odd_model, on_schedule, session, settings, step_batch};
use memory::DType;
use session::StepOutcome;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Instant;

const STEPS: usize = 20;

/// Loss, gradient norm and number of each step.
fn bits(outcome: &StepOutcome) -> (u32, u32, usize) {
    (
        outcome.loss.to_bits(),
        outcome.grad_norm.to_bits(),
        outcome.step,
    )
}

#[test]
fn late_results_are_those_of_their_step() {
    let settings = settings(odd_model(2), DType::F32, "full");
    let mut at_once = session(&settings);
    let batch = |step| step_batch(&settings, step);
    let expected: Vec<_> = (0..STEPS)
        .map(|step| bits(&at_once.step(&batch(step)).unwrap()))
        .collect();
    for seed in 0..3 {
        let mut session = on_schedule(&settings, seed);
        let mut late = Vec::new();
        for step in 0..STEPS {
            session.start_step(&batch(step)).unwrap();
            late.extend(session.take_finished().map(|outcome| bits(&outcome)));
            assert_eq!(
                late.len(),
                step,
                "a step is known to be done when the next one has been asked for"
            );
        }
        late.extend(session.finish_step().unwrap().map(|outcome| bits(&outcome)));
        assert_eq!(late, expected, "seed {seed}");
        assert!(session.finish_step().unwrap().is_none());
    }
}

/// A device may take a few launches ahead alone, so that asking for a step takes as long as the step before it: the time of a step is
/// noted while the next one is asked for, not after.
#[test]
fn a_step_is_known_to_be_done_while_the_next_is_asked_for() {
    let settings = settings(odd_model(2), DType::F32, "full");
    let mut in_time = 0;
    for seed in 0..3 {
        let mut session = on_schedule(&settings, seed);
        let asked_at = Rc::new(Cell::new(Instant::now()));
        let noted = asked_at.clone();
        session.on_micro_batch(move |_, _| noted.set(Instant::now()));
        for step in 0..STEPS {
            session.start_step(&step_batch(&settings, step)).unwrap();
            let before = session.take_finished();
            in_time += usize::from(before.is_some_and(|before| before.done_at < asked_at.get()));
        }
        session.finish_step().unwrap();
    }
    assert!(in_time > 0);
}
