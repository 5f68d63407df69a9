//! What a run writes down of each step.

use super::Run;
use crate::failure::Failure;
use memory::GRANULARITY_BYTES;
use report::{ProcessRecord, RunRecord, StepRecord, Timing, resident_bytes};
use serde::Serialize;
use session::StepOutcome;
use std::time::Duration;

impl Run {
    /// Writes down a step that is done, if there is one, and ends a run that has been skipping steps for too long.
    pub(super) fn record(&mut self, finished: Option<StepOutcome>) -> Result<(), Failure> {
        let Some(outcome) = finished else {
            return Ok(());
        };
        let elapsed = self.made.lap(outcome.done_at);
        let waited = self.data_waits.pop_front().unwrap_or_default();
        self.write_step_record(&outcome, elapsed, waited)?;
        self.made.add(&outcome, elapsed);
        let in_use = outcome
            .memory
            .device
            .map(|marks| marks.device_total_used_bytes);
        for sentence in self.growth.note(resident_bytes(), in_use) {
            tracing::warn!("{sentence}");
        }
        if !outcome.is_finite() {
            let (step, loss, norm) = (outcome.step, outcome.loss, outcome.grad_norm);
            tracing::warn!("step {step} was skipped: loss {loss}, gradient norm {norm}");
        }
        if self.made.skipped_in_a_row > self.resolved.config.train.max_skipped {
            return Err(self.diverged(&outcome));
        }
        Ok(())
    }

    fn write_step_record(
        &mut self,
        outcome: &StepOutcome,
        elapsed: Duration,
        data_wait: Duration,
    ) -> Result<(), Failure> {
        let config = &self.resolved.config;
        let known_peak = || self.device.peak_tflops(self.plan.dtype);
        let peak_tflops = config.hardware.peak_tflops.or_else(known_peak);
        let times = &outcome.memory.phase_time.read();
        let record = StepRecord {
            step: outcome.step,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            finite: outcome.is_finite(),
            lr: outcome.lr as f32,
            tokens: outcome.targets,
            timing: Timing::new(
                elapsed,
                data_wait,
                times,
                outcome.tokens,
                self.plan.flops_per_token,
                peak_tflops,
            ),
            peak_bytes: outcome.memory.peak.bytes,
            planned_peak_bytes: self.plan.peak_bytes,
            peak_by_category: outcome.memory.peak.by_category,
            peak_phase: outcome.memory.peak.place.phase,
            peak_layer: outcome.memory.peak.place.layer,
            phase_peak_bytes: outcome.memory.phase_peaks,
            slab_bytes: outcome.memory.slab_bytes,
            host_pinned_bytes: outcome.memory.host_pinned_bytes,
            replayed: outcome.replayed.clone(),
            h2d_bytes: outcome.traffic.h2d_bytes,
            d2h_bytes: outcome.traffic.d2h_bytes,
            device: outcome.memory.device,
        };
        self.progress.step(&record);
        if let Some(board) = &mut self.board {
            let written = board.step(&record);
            written.map_err(Failure::file(self.directory.path()))?;
        }
        self.write(&record)
    }

    pub(super) fn write_run_record(&mut self) -> Result<(), Failure> {
        let record = RunRecord {
            version: env!("CARGO_PKG_VERSION"),
            device: self.resolved.device().to_string(),
            dtype: self.plan.dtype,
            model: self.resolved.name.clone(),
            parameters: self.plan.parameters,
            flops_per_token: self.plan.flops_per_token,
            granularity_bytes: GRANULARITY_BYTES,
            untracked_host_bytes_max: self.device.untracked_host_bytes_max(),
            process: ProcessRecord::current(),
        };
        self.write(&record)
    }

    /// Appends a line to the metrics.
    pub(super) fn write(&mut self, record: &impl Serialize) -> Result<(), Failure> {
        let written = self.metrics.write(record);
        written.map_err(Failure::file(self.directory.path()))
    }
}
