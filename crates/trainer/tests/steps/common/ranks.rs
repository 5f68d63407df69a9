//! Runs of several ranks, which are threads of the test, and what they came to together.

use super::elsewhere::bits;
use super::side_by_side::in_one_thread;
use super::{assert_as_planned, plan, step_batch};
use collectives::Group;
use data::StepBatch;
use fakes::Threads;
use fakes::scheduled::{Scheduled, Waits};
use files::PieceSource;
use kernels::cpu::Cpu;
use memory::{Home, Memory, Rank};
use model::UnderflowShare;
use session::{Rewards, Session, StepOutcome};
use settings::Settings;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;
use units::{Ranks, Reduce, Zero};

/// What ranks divide, by default.
pub fn ranks(size: usize, zero: Zero) -> Ranks {
    Ranks {
        rank: Rank {
            number: 0,
            of: size,
        },
        stage: Rank::ALONE,
        sharing: 1,
        parts_each: 1,
        zero,
        bucket_bytes: 1 << 20,
        reduce: Reduce::MicroBatch,
        overlap_grad_reduce: true,
        overlap_param_gather: true,
        reshard_after_forward: true,
        shard_group: None,
    }
}

/// The settings of one rank.
pub fn of_rank(settings: &Settings, rank: usize) -> Settings {
    let mut settings = settings.clone();
    if let Some(ranks) = &mut settings.ranks {
        ranks.rank.number = rank % ranks.rank.of;
        ranks.stage.number = rank / ranks.rank.of;
    }
    // A folder belongs to one process at a time.
    if let Home::Disk(folder) = &mut settings.homes.states {
        folder.push(format!("rank-{rank}"));
    }
    settings
}

/// The step of all ranks, as this one has it.
pub fn whole_batch(settings: &Settings, step: usize) -> StepBatch {
    let parts = settings.own_parts();
    let whole = Settings {
        accum: settings.accum * settings.rank().of / settings.sharing().rank.of,
        ..settings.clone()
    };
    let whole = step_batch(&whole, step);
    if parts == memory::OwnParts::WHOLE {
        return whole;
    }
    let targets = whole.target_count();
    let mut own = whole.in_parts(parts);
    own.targets_elsewhere = targets - own.target_count();
    own
}

/// Weights and states, by stem and name: every element once, whichever rank had it.
pub type State = BTreeMap<(String, String), Vec<u8>>;

/// What a run came to, to the bit.
#[derive(Clone, Debug, PartialEq)]
pub struct Together {
    /// Number, loss and norm of each step.
    pub steps: Vec<(usize, u32, u32)>,
    /// What else each step shows.
    pub shown: Vec<Shown>,
    /// Weights and states after the last.
    pub state: State,
}

/// What a step shows beside loss and norm: shares of underflows in FP8, losses of routers, and rewards.
pub type Shown = (Vec<UnderflowShare>, Option<[f32; 2]>, Option<Rewards>);

/// What one rank came to.
pub struct OfRank {
    /// Number, loss and norm of each step, to the bit.
    steps: Vec<(usize, u32, u32)>,
    /// What else each step shows.
    shown: Vec<Shown>,
    /// Tokens of each step that this rank made.
    pub tokens: Vec<usize>,
    /// How often it replayed a stage.
    pub replays: usize,
    /// Bytes that were counted for other ranks.
    pub counted_bytes: u64,
    pieces: Vec<((String, String), usize, Vec<u8>)>,
    /// Bytes that the engine was handed for other ranks.
    pub sent_bytes: u64,
    /// Why its queues waited for one another, where that is known, and how often.
    pub waits: BTreeMap<&'static str, usize>,
    /// As of [`Waits::unordered`].
    pub unordered: BTreeSet<String>,
}

fn shown(outcome: &StepOutcome) -> Shown {
    (
        outcome.fp8_underflows.clone(),
        outcome.router_losses,
        outcome.rewards,
    )
}

/// Makes a rank's session, with fresh weights.
pub fn on_cpu(settings: &Settings, group: &Arc<dyn Group>) -> (Session, Waits) {
    let memory = Memory::host();
    let cpu = Cpu::in_group(&memory, settings.narrowest_dtype(), group.clone()).unwrap();
    let mut session = Session::on_kernels(settings.clone(), &memory, Box::new(cpu)).unwrap();
    session.initialise(7).unwrap();
    (session, Waits::default())
}

/// The same on memory that is no number before it is written.
pub fn on_poisoned_cpu(settings: &Settings, group: &Arc<dyn Group>) -> (Session, Waits) {
    let (session, waits) = on_cpu(settings, group);
    session.memory().set_poison(true);
    (session, waits)
}

/// The same on kernels that run when a seeded scheduler says, without the waits for one reason.
pub fn on_schedule(
    settings: &Settings,
    group: &Arc<dyn Group>,
    seed: u64,
    ignored: Option<&'static str>,
) -> (Session, Waits) {
    let memory = Memory::host();
    let cpu = Cpu::in_group(&memory, settings.narrowest_dtype(), group.clone()).unwrap();
    let kernels = Scheduled::new(cpu, seed * 31 + group.rank() as u64, ignored);
    let waits = kernels.backend().waits();
    let mut session = Session::on_kernels(settings.clone(), &memory, Box::new(kernels)).unwrap();
    session.initialise(7).unwrap();
    (session, waits)
}

/// Runs some steps on every rank, in slabs of exactly the planned bytes; each rank's memory and traffic are what was planned for it.
pub fn each(
    name: &str,
    settings: &Settings,
    steps: usize,
    session: impl Fn(&Settings, &Arc<dyn Group>) -> (Session, Waits) + Sync,
) -> Vec<OfRank> {
    let size = settings.rank_of_all().of;
    let run = |group: Arc<dyn Group>| {
        let settings = of_rank(settings, group.rank());
        let planned = plan(&settings);
        let (mut session, waits) = session(&settings, &group);
        let live = session.memory().live_bytes();
        assert_eq!(live, planned.persistent_bytes, "{name}");
        session.memory().reserve_slab(planned.slab_bytes).unwrap();
        let mut outcomes = Vec::new();
        for step in 0..steps {
            session.start_step(&whole_batch(&settings, step)).unwrap();
            outcomes.extend(session.take_finished());
        }
        outcomes.extend(session.finish_step().unwrap());
        let name = format!("{name}, rank {}", group.rank());
        for outcome in &outcomes {
            assert_as_planned(&name, &planned, outcome);
        }
        assert!(session.padding_is_zero(), "{name}");
        let sent_bytes = group.sent_bytes();
        let state = session.state();
        let pieces = state.pieces().iter().enumerate().map(|(index, piece)| {
            let mut bytes = Vec::new();
            state.write_to(index, &mut bytes).unwrap();
            let name = (piece.stem.clone(), piece.name.clone());
            (name, piece.elements.start, bytes)
        });
        let sent = outcomes.iter().map(|outcome| outcome.traffic.sent_bytes);
        OfRank {
            steps: outcomes.iter().map(bits).collect(),
            shown: outcomes.iter().map(shown).collect(),
            tokens: outcomes.iter().map(|outcome| outcome.tokens).collect(),
            replays: outcomes.iter().map(|one| one.replayed.total()).sum(),
            counted_bytes: sent.sum(),
            pieces: pieces.collect(),
            sent_bytes,
            waits: waits.counts(),
            unordered: waits.unordered(),
        }
    };
    std::thread::scope(|scope| {
        let groups = Threads::with_deadline(size, Duration::from_secs(60));
        let run = &run;
        let threads = groups.into_iter().map(|group| {
            scope.spawn(move || {
                let ran = catch_unwind(AssertUnwindSafe(|| in_one_thread(|| run(group.clone()))));
                // The others must not wait for a rank that is gone.
                ran.inspect_err(|_| group.abort(101))
            })
        });
        let threads: Vec<_> = threads.collect();
        let ran = threads.into_iter().map(|thread| thread.join());
        let ran = ran.map(|ran| ran.and_then(|ran| ran));
        ran.map(|ran| ran.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

/// What all ranks came to, who agree on every step.
pub fn together(ranks: &[OfRank]) -> Together {
    for rank in ranks {
        assert_eq!(rank.steps, ranks[0].steps, "ranks agree");
        assert_eq!(rank.shown, ranks[0].shown, "ranks agree");
    }
    let mut pieces: Vec<_> = ranks.iter().flat_map(|rank| &rank.pieces).collect();
    pieces.sort_by_key(|(name, start, _)| (name.clone(), *start));
    let mut state = State::new();
    for (name, _, bytes) in pieces {
        state.entry(name.clone()).or_default().extend(bytes);
    }
    Together {
        steps: ranks[0].steps.clone(),
        shown: ranks[0].shown.clone(),
        state,
    }
}
