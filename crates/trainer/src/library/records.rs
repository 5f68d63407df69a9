//! The records of a program's steps, as a run directory has them.

use super::Trainer;
use crate::failure::Result;
use crate::train::{StepInputs, step_record};
use data::StepBatch;
use report::StepRecord;
use session::StepOutcome;
use std::time::Duration;

impl Trainer {
    /// The record of the last step, as a line of `metrics.jsonl` has it; none before the first. Its `step_ms` is the time of the call.
    pub fn record(&self) -> Option<&StepRecord> {
        self.record.as_ref()
    }

    /// Writes down a step of `batch`.
    pub(super) fn note(
        &mut self,
        batch: &StepBatch,
        outcome: &StepOutcome,
        elapsed: Duration,
    ) -> Result {
        let asked = StepInputs {
            tokens: outcome.tokens,
            own_targets: outcome.targets,
            own_lengths: self.lengths_of(batch),
            ..StepInputs::default()
        };
        let planned = self.peaks.of_step(&asked.own_lengths)?;
        let flops = (self.plan.flops_per_token, self.peak_tflops);
        self.record = Some(step_record(outcome, (elapsed, &asked), planned, flops));
        self.made.add(outcome, asked.tokens, elapsed);
        Ok(())
    }

    /// Tokens of each row of the micro-batches, whose parts come one after the other.
    fn lengths_of(&self, batch: &StepBatch) -> Vec<usize> {
        let parts = batch.micro.chunks(self.config.own_parts().count);
        let lengths = parts.map(|parts| parts.iter().map(|part| part.seq).sum());
        lengths.collect()
    }
}
