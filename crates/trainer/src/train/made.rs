//! What is known of a step when it is asked for, and what a run has made when it is done.

use crate::job::Job;
use checkpoint::TrainerState;
use data::{MicroBatch, StepBatch};
use session::StepOutcome;
use std::time::{Duration, Instant};

/// What is known of a step before it is made.
#[derive(Clone, Copy, Default)]
pub(super) struct Asked {
    /// How long it waited for its data.
    pub(super) data_wait: Duration,
    /// Tokens of all ranks, masked ones included.
    pub(super) tokens: usize,
    /// Targets that are this rank's.
    pub(super) own_targets: usize,
}

impl Asked {
    pub(super) fn of(job: &Job, batch: &StepBatch, data_wait: Duration) -> Asked {
        let first = job.member().map_or(0, |member| member.rank);
        let own = batch.micro.iter().skip(first).step_by(job.size());
        Asked {
            data_wait,
            tokens: batch.micro.iter().map(|micro| micro.rows * micro.seq).sum(),
            own_targets: own.map(MicroBatch::target_count).sum(),
        }
    }
}

/// What has been made so far.
pub(super) struct Made {
    /// Steps that a checkpoint brought along.
    pub(super) before: usize,
    pub(super) steps: usize,
    pub(super) skipped: usize,
    pub(super) skipped_in_a_row: usize,
    /// Tokens read, masked ones included, and those of them that were targets.
    pub(super) tokens: u64,
    pub(super) targets: u64,
    /// Tokens of this process, and the time of its steps.
    pub(super) tokens_here: u64,
    pub(super) time: Duration,
    /// When the last step was known to be done.
    pub(super) until: Instant,
    pub(super) last: Option<StepOutcome>,
}

impl Made {
    /// What a checkpoint holds, or nothing.
    pub(super) fn after(state: Option<&TrainerState>) -> Made {
        let number = |of: fn(&TrainerState) -> u64| state.map_or(0, of);
        let steps = number(|state| state.step) as usize;
        Made {
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
        }
    }

    /// Time since the step before: on a device that the host runs ahead of, the only one that adds up.
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
        self.last = Some(outcome.clone());
    }
}
