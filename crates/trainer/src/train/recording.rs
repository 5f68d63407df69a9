//! What a run writes down, and tells: metrics, event files, progress.

use super::Run;
use crate::failure::Failure;
use memory::GRANULARITY_BYTES;
use report::{
    EvalRecord, MemoryGrowth, MetricsFile, ProcessRecord, Progress, RunRecord, SampleRecord,
    StepRecord, TensorBoard, Timing, resident_bytes,
};
use serde::Serialize;
use session::StepOutcome;
use settings::Config;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

/// Where a run writes, and what watches it.
pub(super) struct Records {
    /// Of the metrics.
    path: PathBuf,
    metrics: MetricsFile,
    writes_events: bool,
    board: Option<TensorBoard>,
    pub(super) progress: Rc<Progress>,
    growth: MemoryGrowth,
    /// It was said that something cannot be written.
    is_told: bool,
}

impl Records {
    /// Begins the metrics of a run, or opens those of one that goes on after `made` steps.
    pub(super) fn open(
        folder: &Path,
        config: &Config,
        quiet: bool,
        (made, goes_on): (usize, bool),
    ) -> Result<Records, Failure> {
        let path = folder.join("metrics.jsonl");
        let metrics = match goes_on {
            true => MetricsFile::append(&path),
            false => MetricsFile::create(&path),
        };
        let progress = Progress::new(config.train.steps, config.log.every, quiet);
        Ok(Records {
            metrics: metrics.map_err(Failure::file(&path))?,
            writes_events: config.log.tensorboard,
            board: None,
            progress: Rc::new(progress.after(made).accumulating(config.batch.accum)),
            growth: MemoryGrowth::default(),
            is_told: false,
            path,
        })
    }

    /// Forgets what was written of steps after so many: they are made once more.
    pub(super) fn cut(&mut self, made: usize) -> Result<(), Failure> {
        let metrics = MetricsFile::resume(&self.path, made);
        self.metrics = metrics.map_err(Failure::file(&self.path))?;
        Ok(())
    }

    /// Begins event files, if they are asked for.
    pub(super) fn begin_events(&mut self, folder: &Path, made: usize) -> Result<(), Failure> {
        let board = self
            .writes_events
            .then(|| TensorBoard::create(folder, made + 1));
        self.board = board.transpose().map_err(Failure::file(folder))?;
        Ok(())
    }

    /// Writes a line without which the file would not be one.
    pub(super) fn write(&mut self, record: &impl Serialize) -> Result<(), Failure> {
        let written = self.metrics.write(record);
        written.map_err(Failure::file(&self.path))
    }

    /// Writes a line that training does not end for: where there is no room, it is written when there is.
    pub(super) fn note(&mut self, record: &impl Serialize) {
        let written = self.metrics.write(record);
        self.tell(written);
    }

    fn step(&mut self, record: &StepRecord) {
        self.progress.step(record);
        self.note(record);
        if let Some(board) = &mut self.board {
            let written = board.step(record);
            self.tell(written);
        }
    }

    pub(super) fn evaluation(&mut self, record: &EvalRecord) {
        self.progress.evaluation(record);
        self.note(record);
        if let Some(board) = &mut self.board {
            let written = board.evaluation(record.step, record.loss, record.perplexity);
            self.tell(written);
        }
    }

    pub(super) fn sample(&mut self, record: &SampleRecord) {
        self.progress.sample(record);
        self.note(record);
    }

    /// Says once that something could not be written.
    fn tell(&mut self, written: io::Result<()>) {
        match written {
            Err(error) if !self.is_told => {
                tracing::warn!(
                    "cannot write {}: {error}; training goes on, and it is tried again with every step",
                    self.path.display()
                );
                self.is_told = true;
            }
            _ => {}
        }
    }
}

impl Run {
    /// Writes down a step that is done, if there is one, and ends a run that has been skipping steps for too long.
    pub(super) fn record(&mut self, finished: Option<StepOutcome>) -> Result<(), Failure> {
        let Some(outcome) = finished else {
            return Ok(());
        };
        let elapsed = self.made.lap(outcome.done_at);
        let waited = self.data_waits.pop_front().unwrap_or_default();
        let record = self.step_record(&outcome, elapsed, waited);
        self.records.step(&record);
        self.made.add(&outcome, elapsed);
        let marks = outcome.memory.device;
        let in_use = marks.map(|marks| marks.device_total_used_bytes);
        for sentence in self.records.growth.note(resident_bytes(), in_use) {
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

    fn step_record(
        &self,
        outcome: &StepOutcome,
        elapsed: Duration,
        data_wait: Duration,
    ) -> StepRecord {
        let config = &self.resolved.config;
        let known_peak = || self.device.peak_tflops(self.plan.dtype);
        let peak_tflops = config.hardware.peak_tflops.or_else(known_peak);
        let times = &outcome.memory.phase_time.read();
        StepRecord {
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
            disk_read_bytes: outcome.traffic.disk_read_bytes,
            disk_written_bytes: outcome.traffic.disk_written_bytes,
            device: outcome.memory.device,
        }
    }

    pub(super) fn run_record(&self) -> RunRecord {
        RunRecord {
            version: env!("CARGO_PKG_VERSION"),
            device: self.resolved.device().to_string(),
            dtype: self.plan.dtype,
            model: self.resolved.name.clone(),
            parameters: self.plan.parameters,
            flops_per_token: self.plan.flops_per_token,
            granularity_bytes: GRANULARITY_BYTES,
            untracked_host_bytes_max: self.device.untracked_host_bytes_max(),
            process: ProcessRecord::current(),
        }
    }
}
