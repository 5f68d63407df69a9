//! The `train` command: plan, load, loop, summary.

use crate::device::OpenDevice;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::limits::{host_need, limit};
use crate::run_dir::{RunDir, make_folder, refuse_model};
use crate::samples::data_options;
use crate::stdout::print;
use data::{Dataset, Prefetched, prefetch};
use memory::{GRANULARITY_BYTES, Layer, Phase, format_bytes};
use model::Attention;
use planner::{HOST_ARENAS, HostRoom, OomReport, Plan, arena_table};
use report::{
    EndRecord, MetricsFile, Progress, RunRecord, StepRecord, Timing, max_rss_bytes, memory_table,
};
use session::{Session, StepOutcome};
use settings::{AttentionBackend, Config, FLASH_FROM_SEQ, Resolved, Settings};
use std::time::{Duration, Instant};

/// Steps that are read ahead of the one being made.
const PREFETCH_STEPS: usize = 2;

/// Trains a model.
pub(crate) fn train(mut resolved: Resolved) -> Result<(), Failure> {
    let dataset = Dataset::open(&data_options(&resolved))?;
    resolved.config = resolved.decided(dataset.seq());
    let settings = Settings::new(&resolved.config)?;
    let device = OpenDevice::open(resolved.device())?;
    let plan = Plan::with_alternatives(&resolved.config, device.target())?;
    let limit = limit(&resolved, &device)?;
    HostRoom::ask().check(host_need(&plan, device.target(), limit))?;
    if let Some(folder) = &resolved.options.save_final {
        refuse_model(folder)?;
    }
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
        made: Made::nothing(),
    };
    run.write_run_record()?;
    let batches = prefetch(dataset.batches(), PREFETCH_STEPS);
    let outcome = run
        .steps(settings, batches)
        .map_err(|failure| run.explain(failure));
    run.progress.finish();
    run.write_end_record(outcome.as_ref().err())?;
    outcome?;
    print(run.summary())
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

    /// Leases everything that lives across steps, fills the weights, and reserves the slab.
    fn load(&self, settings: Settings) -> Result<Session, Failure> {
        let memory = self.device.memory();
        memory.set_limit(self.limit);
        self.announce();
        let kernels = self.device.kernels(&settings, &memory)?;
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

    /// Looks for fixes of an out-of-memory error and writes them to `oom.json`; leaves other failures alone.
    fn explain(&self, failure: Failure) -> Failure {
        let Failure::OutOfMemory { error, .. } = failure else {
            return failure;
        };
        let report = match OomReport::new(&error, &self.resolved.config, self.device.target()) {
            Ok(report) => report,
            Err(_) => {
                return Failure::OutOfMemory {
                    error,
                    hints: Vec::new(),
                };
            }
        };
        let mut hints = report.hints();
        match self.directory.write_json("oom.json", &report) {
            Ok(path) => hints.push(format!("{} has all figures and fixes", path.display())),
            Err(failure) => hints.push(format!("oom.json could not be written: {failure}")),
        }
        Failure::OutOfMemory { error, hints }
    }

    /// Says beforehand if the plan is above the limit, and what may take a while.
    fn announce(&self) {
        let planned = self.plan.peak_bytes;
        if let Some(limit) = self.limit.filter(|limit| planned > *limit) {
            let (planned, limit) = (format_bytes(planned), format_bytes(limit));
            tracing::warn!(
                "the plan's peak of {planned} is above the limit of {limit}; this run will not fit"
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
        };
        self.metrics
            .write(&record)
            .map_err(Failure::file(self.directory.path()))
    }

    fn write_end_record(&mut self, failure: Option<&Failure>) -> Result<(), Failure> {
        let record = EndRecord {
            reason: failure.map_or("done", Failure::reason),
            steps: self.made.steps,
            skipped_steps: self.made.skipped,
            max_rss_bytes: max_rss_bytes(),
        };
        self.metrics
            .write(&record)
            .map_err(Failure::file(self.directory.path()))
    }

    /// What a person wants to know at the end.
    fn summary(&self) -> String {
        let Some(last) = &self.made.last else {
            return String::new();
        };
        let seconds = self.made.time.as_secs_f64();
        let config = &self.resolved.config;
        let tokens = self.tokens_per_step * self.made.steps;
        let planned = (&self.plan.peak_by_category, &self.plan.phase_peak_bytes);
        let measured = (&last.memory.peak.by_category, &last.memory.phase_peaks);
        let resident = max_rss_bytes().map_or(String::new(), |bytes| {
            format!("  resident set at most {}\n", format_bytes(bytes))
        });
        let skipped = match self.made.skipped {
            0 => String::new(),
            skipped => format!(", {skipped} skipped because loss or gradients were not finite"),
        };
        let mut offload = match config.offload.activations.as_str() {
            "none" => String::new(),
            labels => format!(", {labels} offloaded"),
        };
        let mut host_arenas = String::new();
        if !self.plan.host_arenas.is_empty() {
            offload += ", optimizer states offloaded";
            host_arenas = format!("{}\n", arena_table(HOST_ARENAS, &self.plan.host_arenas));
        }
        let pinned = match last.memory.host_pinned_bytes {
            0 => String::new(),
            bytes => format!("  pinned host memory {}\n", format_bytes(bytes)),
        };
        format!(
            "{} steps{skipped} of {} ({}) in {seconds:.1} s: loss {:.4}, {:.0} tokens/s, recompute {}{offload}\n\n{}\n{}\n\
             {host_arenas}{pinned}{resident}  run directory {}\n",
            self.made.steps,
            self.resolved.name,
            self.plan.dtype,
            last.loss,
            tokens as f64 / seconds,
            config.recompute.spec,
            memory_table(planned, Some(measured)),
            arena_table("across steps", &self.plan.arenas),
            self.directory.path().display(),
        )
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
