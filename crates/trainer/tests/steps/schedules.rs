//! A seeded scheduler reorders queues as far as events allow: bits stay the same, dropping any wait is noticed, and a lease that is
//! refused disturbs nothing.

use crate::common::elsewhere::{bits, run, state};
use crate::common::factors::Run;
use crate::common::ranks::{OfRank, Together, each, on_cpu, on_schedule, together};
use crate::common::side_by_side::side_by_side;
use crate::common::{self, session, step_batch};
use memory::Window;
use session::{Session, SessionError};
use settings::Settings;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tempfile::TempDir;

const STEPS: usize = 3;

/// Schedules of each run.
const SEEDS: u64 = 6;

/// Together they have every reason to wait.
const RUNS: [&str; 34] = [
    "alone batches=2 offloaded=all",
    "alone batches=2 form=bf16 attention=flash offloaded=attention",
    "alone batches=2 attention=flash mode=full offloaded=inputs",
    "alone batches=2 form=bf16 fp8=on offloaded=all",
    "alone batches=1 states=pinned",
    "alone batches=1 states=pinned window=end",
    "alone batches=1 offloaded=mlp states=pinned",
    "alone batches=2 mode=full offloaded=inputs weights=pinned gradients=pinned states=pinned",
    "alone batches=2 weights=one-slot gradients=pinned states=pinned window=end",
    "alone batches=1 mode=uniform weights=three-slots",
    "alone batches=2 offloaded=mlp gradients=pinned",
    "alone batches=1 mode=full weights=pinned gradients=released states=pinned",
    "alone batches=2 mode=full weights=pinned gradients=pinned states=disk",
    "alone batches=2 adapters=some objective=preferences mode=full weights=pinned gradients=pinned states=pinned",
    "alone model=Qwen2-MoE batches=2 weights=pinned expert-units=32 gradients=pinned states=pinned window=end",
    "group model=Qwen2-MoE batches=2 expert-units=32 zero=3 ranks=2 exchanges=some",
    "group mode=uniform ranks=2 exchanges=some",
    "group mode=uniform zero=1 ranks=4",
    "group mode=uniform states=pinned zero=2 ranks=2 exchanges=some",
    "group mode=uniform zero=3 ranks=2",
    "group mode=uniform weights=pinned states=pinned zero=3 ranks=2 exchanges=some",
    "group mode=uniform weights=pinned states=pinned zero=1 ranks=4 exchanges=some",
    "group mode=uniform states=pinned zero=3-groups ranks=4 exchanges=some",
    "group mode=uniform zero=3 exchanges=some parts=3-shared",
    "group form=bf16 fp8=on mode=uniform zero=1 ranks=4 exchanges=some",
    "group form=bf16 fp8=kept mode=uniform zero=3 ranks=2 exchanges=some",
    "group form=bf16 fp8=kept mode=uniform weights=pinned states=pinned zero=3 ranks=2 exchanges=some",
    // Under 1F1B, what two stages send has always left before something comes, for which a pass waits anyway.
    "group mode=uniform states=pinned zero=2 exchanges=some stages=3-gpipe",
    "group mode=uniform states=pinned zero=2 exchanges=some stages=2-interleaved",
    "group mode=uniform zero=2 exchanges=some stages=2-zb-h1",
    "group mode=uniform weights=pinned gradients=pinned states=pinned zero=1 exchanges=some stages=2",
    "group mode=uniform gradients=pinned states=pinned zero=2 ranks=2 exchanges=some",
    "group optimizer=muon mode=uniform weights=pinned gradients=pinned states=pinned zero=2 ranks=4 exchanges=some",
    "group optimizer=muon mode=uniform weights=pinned states=pinned zero=3 ranks=4 exchanges=some",
];

/// Runs whose leases are refused.
const REFUSED: [&str; 5] = [
    "alone batches=2 offloaded=all",
    "alone batches=1 offloaded=mlp states=pinned",
    "alone batches=2 mode=full offloaded=inputs weights=pinned gradients=pinned states=pinned",
    "alone batches=2 weights=one-slot gradients=pinned states=pinned window=end",
    "alone batches=1 mode=full weights=pinned gradients=pinned states=disk",
];

/// A run on schedules, and what it must come to.
struct Scheduled {
    name: &'static str,
    settings: Settings,
    expected: Together,
    /// Where states live that live on a disk.
    _folder: TempDir,
}

impl Scheduled {
    fn new(name: &'static str) -> Scheduled {
        let folder = tempfile::tempdir().unwrap();
        let run = Run::small(name);
        Scheduled {
            name,
            settings: run.moved(folder.path()).unwrap(),
            expected: together(&each(name, &run.reference(), STEPS, on_cpu)),
            _folder: folder,
        }
    }

    /// All ranks, on schedules that begin with a seed.
    fn on(&self, seed: u64, ignored: Option<&'static str>) -> Vec<OfRank> {
        each(self.name, &self.settings, STEPS, |settings, group| {
            on_schedule(settings, group, seed, ignored)
        })
    }

    /// Whether work is unordered without the waits for a reason, or a schedule gives other bits (operations do not declare that they
    /// read single numbers).
    fn needs(&self, reason: &'static str, seed: u64) -> bool {
        // Wrong numbers may end a rank.
        let ranks = catch_unwind(AssertUnwindSafe(|| self.on(seed, Some(reason))));
        ranks.map_or(true, |ranks| {
            !unordered(&ranks).is_empty() || together(&ranks) != self.expected
        })
    }
}

fn unordered(ranks: &[OfRank]) -> BTreeSet<&String> {
    ranks.iter().flat_map(|rank| &rank.unordered).collect()
}

#[test]
fn any_schedule_gives_the_same_bits_and_every_wait_is_needed() {
    let runs = side_by_side(RUNS, |name| {
        let run = Scheduled::new(name);
        let mut reasons = BTreeSet::new();
        for seed in 0..SEEDS {
            let ranks = run.on(seed, None);
            assert_eq!(unordered(&ranks), BTreeSet::new(), "{name}, seed {seed}");
            let actual = together(&ranks);
            assert_eq!(actual.steps, run.expected.steps, "{name}, seed {seed}");
            assert!(actual == run.expected, "{name}, seed {seed}");
            reasons.extend(ranks.iter().flat_map(|rank| rank.waits.keys().copied()));
        }
        (run, reasons)
    });
    let reasons = runs.iter().flat_map(|(_, reasons)| reasons);
    let reasons: BTreeSet<&'static str> = reasons.copied().collect();
    assert_eq!(reasons.len(), 46, "{reasons:#?}");
    let needless = side_by_side(reasons, |reason| {
        let waiting = runs.iter().filter(|(_, reasons)| reasons.contains(reason));
        let waiting: Vec<&Scheduled> = waiting.map(|(run, _)| run).collect();
        let is_needed = |seed| waiting.iter().any(|run| run.needs(reason, seed));
        (!(0..25).any(is_needed)).then_some(reason)
    });
    let needless: Vec<_> = needless.into_iter().flatten().collect();
    assert!(needless.is_empty(), "nothing needs: {needless:#?}");
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
    let refused = side_by_side(REFUSED, |name| {
        let folder = tempfile::tempdir().unwrap();
        let settings = Run::small(name).moved(folder.path()).unwrap();
        let mut refused = BTreeSet::new();
        let first = run(&mut session(&settings), &settings, 0..1, |_| {});
        let both = run(&mut session(&settings), &settings, 0..2, |_| {});
        assert!(first.state != both.state);
        for lease in 0.. {
            let mut session = common::on_schedule(&settings, lease as u64);
            let memory = session.memory().clone();
            session.start_step(&step_batch(&settings, 0)).unwrap();
            let live = memory.live_bytes();
            memory.refuse_after(lease);
            let mut told = Vec::new();
            match session.start_step(&step_batch(&settings, 1)) {
                Ok(()) => break,
                Err(SessionError::OutOfMemory(error)) => {
                    assert_eq!(memory.live_bytes(), live, "{name}, lease {lease}");
                    refused.insert((error.name, error.place.phase.name()));
                }
                Err(failure) => panic!("{name}, lease {lease}: {failure}"),
            }
            finish(&mut session, &mut told);
            if session.progress().0 == 2 {
                // Refused when it was being updated already: that is not left half done.
                assert_eq!(settings.homes.window, Window::End);
                assert!(state(&session) == both.state, "{name}, lease {lease}");
                continue;
            }
            assert_eq!(told, first.steps, "{name}, lease {lease}");
            assert!(state(&session) == first.state, "{name}, lease {lease}");
            session.start_step(&step_batch(&settings, 1)).unwrap();
            finish(&mut session, &mut told);
            assert_eq!(told, both.steps, "{name}, lease {lease}");
            assert!(state(&session) == both.state, "{name}, lease {lease}");
        }
        assert!(!refused.is_empty(), "{name}");
        refused
    });
    let refused: BTreeSet<_> = refused.into_iter().flatten().collect();
    let returning = ["x", "rstd1", "probs", "gate_up", "act"].map(|name| (name, "backward"));
    let units = ["forward", "backward", "optimizer"].map(|phase| ("unit_weights", phase));
    let leases = returning.into_iter().chain(units);
    for leased in leases.chain([("unit_gradients", "backward")]) {
        assert!(refused.contains(&leased), "{leased:?}: {refused:?}");
    }
}
