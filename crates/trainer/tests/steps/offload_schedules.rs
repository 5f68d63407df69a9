//! Offloaded activations on queues that run when a seeded scheduler says: any order that the events allow gives the
//! same bits, and none of the waits can be left out.

use crate::common::{
    assert_as_planned, odd_model, offloading, on_schedule, plan, session, settings, step_batch,
};
use memory::DType;
use model::Attention;
use session::SessionError;
use session::{Session, StepOutcome};
use settings::Settings;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

const STEPS: usize = 2;

/// What is recomputed, and what is offloaded beside it.
const CASES: [(DType, Attention, &str, &str); 5] = [
    (
        DType::F32,
        Attention::Eager,
        "none",
        "block_input,layernorm,qkv,core_attn,attn_value,attn_out,mlp",
    ),
    (DType::BF16, Attention::Flash, "none", "qkv,core_attn,mlp"),
    (DType::F32, Attention::Flash, "full", "block_input"),
    (
        DType::F32,
        Attention::Eager,
        "mlp_act,core_attn",
        "attn_value,layernorm",
    ),
    (DType::BF16, Attention::Eager, "full:block:1", "block_input"),
];

/// Four layers, one row of 9 tokens, two micro-batches. Returns the settings that offload and, with nothing offloaded,
/// the bits to expect.
fn small(
    (dtype, attention, mode, labels): (DType, Attention, &str, &str),
) -> (Settings, Vec<(u32, u32)>) {
    let keeps = Settings {
        seq: 9,
        micro_batch: 1,
        head_chunk: 5,
        attention,
        ..settings(odd_model(4), dtype, mode)
    };
    let offloads = offloading(&keeps, labels).expect("nothing is both recomputed and offloaded");
    let plans = [&keeps, &offloads].map(plan);
    assert!(plans[0].d2h_bytes < plans[1].d2h_bytes && plans[0].peak_bytes > plans[1].peak_bytes);
    let mut session = session(&keeps);
    let bits = (0..STEPS).map(|step| bits(&session.step(&step_batch(&keeps, step)).unwrap()));
    let expected = bits.collect();
    (offloads, expected)
}

fn bits(outcome: &StepOutcome) -> (u32, u32) {
    (outcome.loss.to_bits(), outcome.grad_norm.to_bits())
}

/// Loss and gradient norm of each step, read a step late, as in a run.
fn late_bits(session: &mut Session, settings: &Settings) -> Vec<(u32, u32)> {
    let mut late = Vec::new();
    for step in 0..STEPS {
        session.start_step(&step_batch(settings, step)).unwrap();
        late.extend(session.take_finished());
    }
    late.extend(session.finish_step().unwrap());
    let plan = plan(settings);
    late.iter()
        .for_each(|outcome| assert_as_planned("on schedule", &plan, outcome));
    late.iter().map(bits).collect()
}

#[test]
fn every_schedule_gives_the_same_bits() {
    for (number, case) in CASES.into_iter().enumerate() {
        let (settings, expected) = small(case);
        for seed in 0..6 {
            let seed = 100 * number as u64 + seed;
            let (mut session, waits) = on_schedule(&settings, seed, None);
            let actual = late_bits(&mut session, &settings);
            assert_eq!(actual, expected, "{case:?}, seed {seed}");
            assert_eq!(waits.counts().len(), 4, "{:?}", waits.counts());
            assert_eq!(waits.unordered(), BTreeSet::new(), "{case:?}");
        }
    }
}

/// Without the waits for one reason, work that touches the same bytes is unordered, whatever the reason.
#[test]
fn every_wait_is_needed() {
    let (settings, _) = small(CASES[0]);
    let (mut session, waits) = on_schedule(&settings, 0, None);
    late_bits(&mut session, &settings);
    for reason in waits.counts().into_keys() {
        let (mut session, waits) = on_schedule(&settings, 0, Some(reason));
        // Wrong numbers may end the run.
        let _ = catch_unwind(AssertUnwindSafe(|| late_bits(&mut session, &settings)));
        assert!(!waits.unordered().is_empty(), "nothing needs `{reason}`");
    }
}

/// Refuses each lease of a step in turn, while copies are under way: the leases come back, and what was under way
/// disturbs no later step.
#[test]
fn a_refused_lease_leaves_no_copy_behind() {
    let (settings, expected) = small(CASES[0]);
    let batch = step_batch(&settings, 0);
    let mut refused = BTreeSet::new();
    for lease in 0.. {
        let (mut session, _) = on_schedule(&settings, lease as u64, None);
        let memory = session.memory().clone();
        let live = memory.live_bytes();
        memory.refuse_after(lease);
        match session.step(&batch) {
            Ok(_) => break,
            Err(SessionError::OutOfMemory(error)) => {
                assert_eq!(memory.live_bytes(), live, "lease {lease}");
                refused.insert((error.name, error.place.phase.name(), error.category.name()));
            }
            Err(failure) => panic!("lease {lease}: {failure}"),
        }
        let outcome = session.step(&batch).unwrap();
        assert_eq!(bits(&outcome), expected[0], "lease {lease}");
    }
    for name in ["x", "rstd1", "probs", "gate_up", "act"] {
        let returning = (name, "backward", "activation");
        assert!(
            refused.contains(&returning),
            "{name} was refused on its return: {refused:?}"
        );
    }
}
