//! The `train` command: plan, load, loop, summary.

mod ending;

use crate::chosen::chosen;
use crate::device::OpenDevice;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::limits::{host_need, limit};
use crate::run_dir::{RunDir, make_folder, refuse_model};
use crate::samples::data_options;
use crate::stdout::print;
use crate::tracer::Tracer;
use data::{Dataset, Prefetched, prefetch};
use memory::{GRANULARITY_BYTES, Layer, Phase, format_bytes};
use model::Attention;
use planner::{HostNeed, HostRoom, Plan, first_refused};
use report::{
    MemoryGrowth, MetricsFile, ProcessRecord, Progress, RunRecord, StepRecord, Timing,
    resident_bytes,
};
use session::{Session, StepOutcome};
use settings::{AttentionBackend, Config, FLASH_FROM_SEQ, Resolved, Settings};
use std::time::{Duration, Instant};

/// Steps that are read ahead of the one being made.
const PREFETCH_STEPS: usize = 2;

/// Trains a model.
pub(crate) fn train(mut resolved: Resolved) -> Result<(), Failure> {
    let dataset = Dataset::open(&data_options(&resolved))?;
    resolved.config = chosen(&resolved, resolved.decided(dataset.seq()))?;
    let settings = Settings::new(&resolved.config)?;
    let device = OpenDevice::open(resolved.device())?;
    let plan = Plan::with_alternatives(&resolved.config, device.target())?;
    let limit = limit(&resolved, &device)?;
    refuse_beforehand(&resolved, host_need(&plan, device.target(), limit))?;
    if resolved.config.log.nvtx {
        device.show_ranges();
    }
    choose_attention(&mut resolved.config, settings.attention);
    let directory = RunDir::create(&resolved, &plan)?;
    if let Some(folder) = &resolved.options.save_final {
        make_folder(folder, "--save-final")?;
    }
    tracing::info!("training on {}", dataset.describe());
    let mut run = Run {
        metrics: MetricsFile::create(&directory.path().join("metrics.jsonl"))
            .map_err(Failure::file(directory.path()))?,
        progress: Progress::new(
            resolved.config.train.steps,
            resolved.config.log.every,
            resolved.options.quiet,
        ),
        interrupt: Interrupt::new().map_err(|error| Failure::Device(error.to_string()))?,
        resolved,
        device,
        plan,
        limit,
        tokens_per_step: settings.tokens_per_step(),
        directory,
        tracer: None,
        growth: MemoryGrowth::default(),
        made: Made::nothing(),
    };
    run.write_run_record()?;
    let batches = prefetch(dataset.batches(), PREFETCH_STEPS);
    let outcome = run
        .steps(settings, batches)
        .map_err(|failure| run.explain(failure));
    run.progress.finish();
    let ended = run.write_end_record(outcome.as_ref().err());
    run.draw(outcome.as_ref().err());
    // Why the run failed says more than that its last line could not be written.
    outcome?;
    ended?;
    print(run.summary())
}

/// Refuses what would fail later, or write over what is there.
fn refuse_beforehand(resolved: &Resolved, need: HostNeed) -> Result<(), Failure> {
    if !resolved.config.memory.force {
        HostRoom::ask().check(need)?;
    }
    if let Some(Some(_)) = resolved.options.trace {
        return Err(Failure::Usage(
            "train draws into its run directory; write --trace without a folder, and name the run's with --out".into(),
        ));
    }
    match &resolved.options.save_final {
        Some(folder) => refuse_model(folder),
        None => Ok(()),
    }
}

/// Writes down the kind of attention that `auto` stands for: planned or trained again from its run directory, the run is
/// the same.
fn choose_attention(config: &mut Config, attention: Attention) {
    let chosen = match attention {
        Attention::Eager => AttentionBackend::Eager,
        Attention::Flash => AttentionBackend::Flash,
    };
    if config.attention.backend == AttentionBackend::Auto {
        let seq = config.data.seq;
        tracing::info!(
            "attention is {chosen}: auto takes flash from {FLASH_FROM_SEQ} tokens on, and these sequences have {seq}"
        );
    }
    config.attention.backend = chosen;
}

/// Pinned host memory from which leasing it is announced.
const PINNING_TAKES_A_WHILE: u64 = 1 << 30;

/// What to say before pinned memory is leased: pinning and zeroing take seconds for every few GiB.
fn pinning(bytes: u64) -> Option<String> {
    (bytes >= PINNING_TAKES_A_WHILE).then(|| {
        format!(
            "pinning and zeroing {} of host memory, which may take a while",
            format_bytes(bytes)
        )
    })
}

/// A run under way.
struct Run {
    resolved: Resolved,
    device: OpenDevice,
    plan: Plan,
    /// The limit on live device bytes.
    limit: Option<u64>,
    /// Masked tokens included.
    tokens_per_step: usize,
    directory: RunDir,
    metrics: MetricsFile,
    progress: Progress,
    interrupt: Interrupt,
    /// Where pictures are wanted.
    tracer: Option<Tracer>,
    growth: MemoryGrowth,
    made: Made,
}

/// What has been made so far.
struct Made {
    steps: usize,
    skipped: usize,
    skipped_in_a_row: usize,
    time: Duration,
    /// When the last step was known to be done.
    until: Instant,
    last: Option<StepOutcome>,
}

impl Made {
    fn nothing() -> Made {
        Made {
            steps: 0,
            skipped: 0,
            skipped_in_a_row: 0,
            time: Duration::ZERO,
            until: Instant::now(),
            last: None,
        }
    }

    /// Time since the step before: on a device that the host runs ahead of, the only one that adds up.
    fn lap(&mut self, done_at: Instant) -> Duration {
        done_at - std::mem::replace(&mut self.until, done_at)
    }

    fn add(&mut self, outcome: &StepOutcome, elapsed: Duration) {
        let skipped = usize::from(!outcome.is_finite());
        self.steps = outcome.step;
        self.skipped += skipped;
        self.skipped_in_a_row = (self.skipped_in_a_row + skipped) * skipped;
        self.time += elapsed;
        self.last = Some(outcome.clone());
    }
}

impl Run {
    /// Loads the model and makes all steps.
    fn steps(&mut self, settings: Settings, mut batches: Prefetched) -> Result<(), Failure> {
        let mut session = self.load(settings)?;
        let made = self.make_steps(&mut session, &mut batches);
        if let Some(tracer) = &mut self.tracer {
            tracer.stop();
        }
        // The last step may still be at work, whatever ended the run.
        let last = session.finish_step();
        let last = last.map_err(Failure::from);
        let recorded = last.and_then(|last| self.record(last));
        made.and(recorded)?;
        if let Some(folder) = &self.resolved.options.save_final {
            session.export(folder)?;
        }
        match &self.made.last {
            Some(last) if !last.is_finite() => Err(self.diverged(last)),
            _ => Ok(()),
        }
    }

    /// Asks for step after step; each is recorded when it is known to be done.
    fn make_steps(
        &mut self,
        session: &mut Session,
        batches: &mut Prefetched,
    ) -> Result<(), Failure> {
        self.made.until = Instant::now();
        for step in 1..=self.resolved.config.train.steps {
            let batch = batches.next_step()?;
            if let Some(tracer) = &self.tracer {
                tracer.begin_step();
            }
            session.start_step(&batch)?;
            self.record(session.take_finished())?;
            if self.resolved.options.dump_gradients == Some(step as u64) {
                session.export_gradients(&self.directory.gradients(step)?)?;
            }
            if let Some(signal) = self.interrupt.signal() {
                return Err(Failure::Interrupted { step, signal });
            }
        }
        Ok(())
    }

    fn diverged(&self, outcome: &StepOutcome) -> Failure {
        Failure::Diverged {
            step: outcome.step,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            skipped: self.made.skipped_in_a_row,
        }
    }

    /// Refuses a run whose plan does not fit, before anything is leased: it would fail in its first step, or while it is loaded.
    fn refuse_what_does_not_fit(&self, settings: &Settings) -> Result<(), Failure> {
        if self.resolved.config.memory.force {
            return Ok(());
        }
        let planned = (self.plan.peak_bytes, self.plan.reserved_bytes);
        let over = self.limit.filter(|limit| planned.0 > *limit);
        let by_limit = over.map(|limit| first_refused(settings, self.device.target(), limit));
        let by_device = self.device.first_refused(settings, planned)?;
        match by_limit.transpose()?.flatten().or(by_device) {
            None => Ok(()),
            Some(error) => Err(Failure::from(error)),
        }
    }

    /// Leases everything that lives across steps, fills the weights, and reserves the slab.
    fn load(&mut self, settings: Settings) -> Result<Session, Failure> {
        self.refuse_what_does_not_fit(&settings)?;
        let memory = self.device.memory();
        memory.set_limit(self.limit);
        self.announce();
        let kernels = match self.resolved.config.log.trace {
            false => self.device.kernels(&settings, &memory)?,
            true => {
                let tracer = self.tracer.insert(Tracer::new(&memory));
                tracer.kernels(&self.device, &settings)?
            }
        };
        self.device.warn_if_full(self.plan.reserved_bytes)?;
        let mut session = Session::on_kernels(settings, &memory, kernels)?;
        {
            let _place = memory.enter(Phase::Load, Layer::Whole);
            match &self.resolved.options.init_from {
                Some(folder) => session.import(folder)?,
                None => session.initialise(self.resolved.config.train.seed)?,
            }
        }
        memory.reserve_slab(self.plan.slab_bytes)?;
        Ok(session)
    }

    /// Says beforehand if the plan is above the limit, and what may take a while.
    fn announce(&self) {
        let planned = self.plan.peak_bytes;
        if let Some(limit) = self.limit.filter(|limit| planned > *limit) {
            let (planned, limit) = (format_bytes(planned), format_bytes(limit));
            tracing::warn!(
                "the plan's peak of {planned} is above the limit of {limit}; --force tries it anyway"
            );
        }
        if let Some(news) = pinning(self.plan.host_pinned_bytes) {
            tracing::info!("{news}");
        }
    }

    /// Writes down a step that is done, if there is one, and ends a run that has been skipping steps for too long.
    fn record(&mut self, finished: Option<StepOutcome>) -> Result<(), Failure> {
        let Some(outcome) = finished else {
            return Ok(());
        };
        let elapsed = self.made.lap(outcome.done_at);
        self.write_step_record(&outcome, elapsed)?;
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
                times,
                self.tokens_per_step,
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
        self.metrics
            .write(&record)
            .map_err(Failure::file(self.directory.path()))
    }

    fn write_run_record(&mut self) -> Result<(), Failure> {
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
        self.metrics
            .write(&record)
            .map_err(Failure::file(self.directory.path()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn only_much_pinned_memory_is_announced() {
        assert_eq!(pinning(GIB - 1), None);
        let news = pinning(80 * GIB).unwrap();
        assert!(
            news.contains("80.0 GiB") && news.contains("a while"),
            "{news}"
        );
    }
}
