//! What a run writes down, and tells: metrics, event files, progress.

use super::Run;
use super::made::Asked;
use crate::failure::Failure;
use crate::job::Job;
use crate::run_dir::RunDir;
use memory::GRANULARITY_BYTES;
use report::{
    EvalRecord, MemoryGrowth, MetricsFile, ProcessRecord, Progress, RunRecord, SampleRecord,
    StepRecord, TensorBoard, Timing, resident_bytes,
};
use serde::Serialize;
use session::StepOutcome;
use settings::Resolved;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

/// Where a run writes, and what watches it.
pub(super) struct Records {
    /// The run's, where this process writes them.
    metrics: Option<Metrics>,
    /// This rank's own, where there are ranks.
    own: Option<Metrics>,
    writes_events: bool,
    board: Option<TensorBoard>,
    pub(super) progress: Rc<Progress>,
    growth: MemoryGrowth,
    /// It was said that something cannot be written.
    is_told: bool,
}

/// A file of metrics, and where it is.
struct Metrics {
    path: PathBuf,
    file: MetricsFile,
}

impl Metrics {
    fn open(folder: &Path, goes_on: bool) -> Result<Metrics, Failure> {
        let path = folder.join("metrics.jsonl");
        let file = match goes_on {
            true => MetricsFile::append(&path),
            false => MetricsFile::create(&path),
        };
        let file = file.map_err(Failure::file(&path))?;
        Ok(Metrics { path, file })
    }

    fn write(&mut self, record: &impl Serialize) -> Result<(), Failure> {
        self.file.write(record).map_err(Failure::file(&self.path))
    }
}

impl Records {
    /// Begins the metrics of a run, or opens those of one that goes on after `made` steps. What a run has once is written and
    /// told by the first rank.
    pub(super) fn open(
        job: &Job,
        directory: &RunDir,
        resolved: &Resolved,
        (made, goes_on): (usize, bool),
    ) -> Result<Records, Failure> {
        let (config, leads) = (&resolved.config, job.leads());
        let metrics = leads.then(|| Metrics::open(directory.path(), goes_on));
        let own = directory.own().map(|own| Metrics::open(own, goes_on));
        let quiet = resolved.options.quiet || !leads;
        let progress = Progress::new(config.train.steps, config.log.every, quiet);
        Ok(Records {
            metrics: metrics.transpose()?,
            own: own.transpose()?,
            writes_events: config.log.tensorboard && leads,
            board: None,
            progress: Rc::new(progress.after(made).accumulating(config.batch.accum)),
            growth: MemoryGrowth::default(),
            is_told: false,
        })
    }

    /// Forgets what was written of steps after so many: they are made once more.
    pub(super) fn cut(&mut self, made: usize) -> Result<(), Failure> {
        self.files().try_for_each(|metrics| {
            let file = MetricsFile::resume(&metrics.path, made);
            metrics.file = file.map_err(Failure::file(&metrics.path))?;
            Ok(())
        })
    }

    fn files(&mut self) -> impl Iterator<Item = &mut Metrics> {
        self.metrics.iter_mut().chain(&mut self.own)
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
        self.files().try_for_each(|metrics| metrics.write(record))
    }

    /// Writes a line that is this rank's alone.
    pub(super) fn write_own(&mut self, record: &impl Serialize) -> Result<(), Failure> {
        self.own
            .iter_mut()
            .try_for_each(|metrics| metrics.write(record))
    }

    /// Writes a line that training does not end for: where there is no room, it is written when there is.
    pub(super) fn note(&mut self, record: &impl Serialize) {
        let written = self.write(record);
        self.tell(written);
    }

    /// Writes a step down, as the run has it and as this rank does: with its own targets.
    fn step(&mut self, record: &StepRecord, own_targets: usize) {
        self.progress.step(record);
        let own = StepRecord {
            tokens: own_targets,
            ..record.clone()
        };
        let of_run = self.metrics.as_mut().map(|metrics| metrics.write(record));
        let of_rank = self.own.as_mut().map(|metrics| metrics.write(&own));
        for written in [of_run, of_rank].into_iter().flatten() {
            self.tell(written);
        }
        if let Some(board) = &mut self.board {
            let written = board.step(record).map_err(Failure::file("the event file"));
            self.tell(written);
        }
    }

    pub(super) fn evaluation(&mut self, record: &EvalRecord) {
        self.progress.evaluation(record);
        self.note(record);
        if let Some(board) = &mut self.board {
            let written = board.evaluation(record.step, record.loss, record.perplexity);
            self.tell(written.map_err(Failure::file("the event file")));
        }
    }

    pub(super) fn sample(&mut self, record: &SampleRecord) {
        self.progress.sample(record);
        self.note(record);
    }

    /// Says once that something could not be written.
    fn tell(&mut self, written: Result<(), Failure>) {
        match written {
            Err(failure) if !self.is_told => {
                tracing::warn!(
                    "{failure}; training goes on, and it is tried again with every step"
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
        let asked = self.asked.pop_front().unwrap_or_default();
        let planned_peak_bytes = self.peaks.of_step(&asked.own_lengths)?;
        let record = self.step_record(&outcome, elapsed, &asked, planned_peak_bytes);
        self.records.step(&record, asked.own_targets);
        self.made.add(&outcome, asked.tokens, elapsed);
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
        asked: &Asked,
        planned_peak_bytes: u64,
    ) -> StepRecord {
        let config = &self.resolved.config;
        let known_peak = || self.device.peak_tflops(self.plan.dtype);
        let peak_tflops = config.hardware.peak_tflops.or_else(known_peak);
        let of_all = |peak: f64| peak * self.job.size() as f64;
        let times = &outcome.memory.phase_time.read();
        StepRecord {
            step: outcome.step,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            finite: outcome.is_finite(),
            lr: outcome.lr as f32,
            lr_matrices: outcome.lr_matrices.map(|rate| rate as f32),
            epoch: asked.epoch,
            tokens: outcome.targets,
            timing: Timing::new(
                elapsed,
                asked.data_wait,
                times,
                asked.tokens,
                self.plan.flops_per_token,
                peak_tflops.map(of_all),
            ),
            peak_bytes: outcome.memory.peak.bytes,
            planned_peak_bytes,
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
            sent_bytes: self.plan.ranks.as_ref().map(|_| outcome.traffic.sent_bytes),
            device: outcome.memory.device,
        }
    }

    pub(super) fn run_record(&self) -> RunRecord {
        RunRecord {
            version: env!("CARGO_PKG_VERSION"),
            device: self.resolved.device().to_string(),
            dtype: self.plan.dtype,
            attention: self.plan.attention.name(),
            cudnn_version: self.plan.cudnn_version.clone(),
            model: self.resolved.name.clone(),
            parameters: self.plan.parameters,
            flops_per_token: self.plan.flops_per_token,
            granularity_bytes: GRANULARITY_BYTES,
            untracked_host_bytes_max: self.device.untracked_host_bytes_max()
                + self.plan.host_beside_bytes(),
            algorithms: self.plan.algorithms.clone(),
            graphs: self.plan.graphs,
            graphs_off: self.plan.graphs_off,
            process: ProcessRecord::current(),
        }
    }
}
