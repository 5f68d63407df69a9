//! What is known of a step when it is started, and the totals of a run.

use checkpoint::TrainerState;
use data::{MicroBatch, Position, StepBatch};
use memory::{ByCategory, ByPhase, Phase, Rank, StepMemory};
use session::StepOutcome;
use std::time::{Duration, Instant};

/// What is known of a step before it is made.
#[derive(Clone, Default)]
pub(crate) struct StepInputs {
    /// Time that it waited for its data.
    pub(crate) data_wait: Duration,
    /// Tokens of all ranks, masked ones included.
    pub(crate) tokens: usize,
    /// This rank's targets.
    pub(crate) own_targets: usize,
    /// Lengths of this rank's micro-batches.
    pub(crate) own_lengths: Vec<usize>,
    /// Number of passes over the data after it, to four decimals.
    pub(crate) epoch: f64,
}

impl StepInputs {
    /// `rank` is this one among those that make other micro-batches, `parts` is how many of each it makes, `next` is the sample that
    /// follows, and `samples` the number in a pass.
    pub(crate) fn of(
        (rank, parts): (Rank, usize),
        batch: &StepBatch,
        data_wait: Duration,
        (next, samples): (Position, usize),
    ) -> StepInputs {
        let all = || batch.micro.chunks(parts);
        let own = || all().skip(rank.number).step_by(rank.of);
        let length = |parts: &[MicroBatch]| parts.iter().map(|part| part.seq).sum();
        StepInputs {
            data_wait,
            tokens: batch.micro.iter().map(|micro| micro.rows * micro.seq).sum(),
            own_targets: own().flatten().map(MicroBatch::target_count).sum(),
            own_lengths: own().map(length).collect(),
            epoch: (1e4 * (next.epoch as f64 + next.index as f64 / samples as f64)).round() / 1e4,
        }
    }
}

/// Totals of the run so far.
pub(crate) struct Totals {
    /// Steps made before the checkpoint that was resumed.
    pub(crate) before: usize,
    pub(crate) steps: usize,
    pub(crate) skipped: usize,
    pub(crate) skipped_in_a_row: usize,
    /// Tokens read, masked ones included, and how many were targets.
    pub(crate) tokens: u64,
    pub(crate) targets: u64,
    /// Tokens of this process, and the time of its steps.
    pub(crate) tokens_here: u64,
    pub(crate) time: Duration,
    /// When the last step was known to be done.
    pub(crate) until: Instant,
    pub(crate) last: Option<StepOutcome>,
    /// The most memory that a step of this process has used.
    pub(crate) used: Used,
}

/// The most memory that any of several steps used.
#[derive(Default)]
pub(crate) struct Used {
    peak_bytes: u64,
    /// Bytes live at that peak.
    pub(crate) by_category: ByCategory,
    pub(crate) by_phase: ByPhase<u64>,
    pub(crate) host_pinned_bytes: u64,
}

impl Used {
    fn add(&mut self, step: &StepMemory) {
        if step.peak.bytes > self.peak_bytes {
            (self.peak_bytes, self.by_category) = (step.peak.bytes, step.peak.by_category);
        }
        for phase in Phase::ALL {
            let most = self.by_phase.get_mut(phase);
            *most = (*most).max(step.phase_peaks.get(phase));
        }
        self.host_pinned_bytes = self.host_pinned_bytes.max(step.host_pinned_bytes);
    }
}

impl Totals {
    /// The totals in a checkpoint; zero without one.
    pub(crate) fn after(state: Option<&TrainerState>) -> Totals {
        let number = |of: fn(&TrainerState) -> u64| state.map_or(0, of);
        let steps = number(|state| state.step) as usize;
        Totals {
            before: steps,
            steps,
            skipped: number(|state| state.skipped) as usize,
            skipped_in_a_row: number(|state| state.skipped_in_a_row) as usize,
            tokens: number(|state| state.tokens),
            targets: number(|state| state.targets),
            tokens_here: 0,
            time: Duration::ZERO,
            until: Instant::now(),
            last: None,
            used: Used::default(),
        }
    }

    /// Time since the step before. If the host runs ahead of the device, only these times add up to the run's.
    pub(crate) fn lap(&mut self, done_at: Instant) -> Duration {
        let before = std::mem::replace(&mut self.until, done_at);
        done_at.saturating_duration_since(before)
    }

    pub(crate) fn add(&mut self, outcome: &StepOutcome, tokens: usize, elapsed: Duration) {
        let skipped = usize::from(!outcome.is_finite());
        self.steps = outcome.step;
        self.skipped += skipped;
        self.skipped_in_a_row = (self.skipped_in_a_row + skipped) * skipped;
        self.tokens += tokens as u64;
        self.tokens_here += tokens as u64;
        self.targets += outcome.targets as u64;
        self.time += elapsed;
        self.used.add(&outcome.memory);
        self.last = Some(outcome.clone());
    }
}
