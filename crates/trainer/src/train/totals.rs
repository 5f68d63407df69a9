//! What is known of a step when it is started, and the totals of a run.

use checkpoint::TrainerState;
use data::{MicroBatch, Position, StepBatch};
use memory::{ByCategory, ByPhase, Phase, Rank, StepMemory};
use session::StepOutcome;
use std::time::{Duration, Instant};

/// What is known of a step before it is made.
#[derive(Clone, Default)]
pub(super) struct StepInputs {
    /// Time that it waited for its data.
    pub(super) data_wait: Duration,
    /// Tokens of all ranks, masked ones included.
    pub(super) tokens: usize,
    /// This rank's targets.
    pub(super) own_targets: usize,
    /// Lengths of this rank's micro-batches.
    pub(super) own_lengths: Vec<usize>,
    /// Number of passes over the data after it, to four decimals.
    pub(super) epoch: f64,
}

impl StepInputs {
    /// `rank` is this one among those that make other micro-batches, `parts` is how many of each it makes, `next` is the sample that
    /// follows, and `samples` the number in a pass.
    pub(super) fn of(
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
pub(super) struct Totals {
    /// Steps made before the checkpoint that was resumed.
    pub(super) before: usize,
    pub(super) steps: usize,
    pub(super) skipped: usize,
    pub(super) skipped_in_a_row: usize,
    /// Tokens read, masked ones included, and how many were targets.
    pub(super) tokens: u64,
    pub(super) targets: u64,
    /// Tokens of this process, and the time of its steps.
    pub(super) tokens_here: u64,
    pub(super) time: Duration,
    /// When the last step was known to be done.
    pub(super) until: Instant,
    pub(super) last: Option<StepOutcome>,
    /// The most memory that a step of this process has used.
    pub(super) used: Used,
}

/// The most memory that any of several steps used.
#[derive(Default)]
pub(super) struct Used {
    peak_bytes: u64,
    /// Bytes live at that peak.
    pub(super) by_category: ByCategory,
    pub(super) by_phase: ByPhase<u64>,
    pub(super) host_pinned_bytes: u64,
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
    pub(super) fn after(state: Option<&TrainerState>) -> Totals {
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
    pub(super) fn lap(&mut self, done_at: Instant) -> Duration {
        let before = std::mem::replace(&mut self.until, done_at);
        done_at.saturating_duration_since(before)
    }

    pub(super) fn add(&mut self, outcome: &StepOutcome, tokens: usize, elapsed: Duration) {
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
