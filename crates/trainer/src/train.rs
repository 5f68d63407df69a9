//! The `train` command: plan, load, loop, summary.

mod alike;
mod between;
mod ending;
mod joint;
mod recording;
mod resuming;
mod saving;

pub(crate) use resuming::configuration as resumed_configuration;

use crate::attention::{self, cudnn_version};
use crate::chosen::{Holder, chosen};
use crate::device::OpenDevice;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::job::{Ended, Job, together};
use crate::limits::{limit, refuse_without_room};
use crate::run_dir::{RunDir, make_folder, refuse_model};
use crate::samples::{data_options, fit_evaluation};
use crate::stdout::print;
use crate::tracer::Tracer;
use between::Between;
use checkpoint::TrainerState;
use collectives::Launch;
use data::{Batches, Dataset, MicroBatch, Position, Prefetched, StepBatch, prefetch};
use memory::{Layer, Phase, format_bytes};
use planner::{Plan, first_refused};
use recording::Records;
use report::{ProcessRecord, ResumeRecord};
use resuming::Resumed;
use saving::{Saver, origin};
use session::{Session, SessionError, StepOutcome};
use settings::{Config, GRAPHS_FROM_ACCUM, HEURISTIC, OptimizerPlace, Resolved, Settings};
use std::collections::VecDeque;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Trains a model, or goes on with it; as one of several ranks, if a launcher started this process so.
pub(crate) fn train(resolved: Resolved, launch: Option<&Launch>) -> Result<(), Ended> {
    // By its own wish a process is alone, whatever started it.
    let launch = launch.filter(|_| resolved.config.member.is_some());
    let job = Job::start(&resolved.config, resolved.device(), launch)?;
    together(Rc::new(job), |job| train_in(job, resolved))
}

fn train_in(job: &Rc<Job>, resolved: Resolved) -> Result<(), Failure> {
    job.compare(&alike::asked_for(&resolved.options))?;
    let prepared = job.agree(Prepared::new(job, resolved))?;
    job.compare(&prepared.facts(job)?)?;
    let (mut run, settings, dataset, resumed) = Run::open(job, prepared)?;
    tracing::info!("training on {}", dataset.describe());
    let batches = match &resumed {
        None => dataset.batches(),
        Some(resumed) => resumed.seek(dataset)?,
    };
    let outcome = run
        .steps(settings, batches, resumed.as_ref())
        .map_err(|failure| run.explain(failure));
    run.records.progress.finish();
    let ended = run.write_end_record(outcome.as_ref().err());
    run.draw(outcome.as_ref().err());
    // Why the run failed says more than that its last line could not be written.
    if let Err(failure) = outcome {
        if job.ends_others(&failure) {
            // The device waits for its queues when it is dropped, and these may wait for other ranks.
            std::mem::forget(run);
        }
        return Err(failure);
    }
    ended?;
    match job.leads() {
        true => print(run.summary()),
        false => Ok(()),
    }
}

/// A run that nothing is written of yet, with all that it reads.
struct Prepared {
    resolved: Resolved,
    resumed: Option<Resumed>,
    dataset: Dataset,
    settings: Settings,
    device: OpenDevice,
    plan: Plan,
    limit: Option<u64>,
}

impl Prepared {
    fn new(job: &Job, mut resolved: Resolved) -> Result<Prepared, Failure> {
        let mut resumed = Resumed::find(job, &resolved)?;
        let dataset = Dataset::open(&data_options(&resolved))?;
        let mut config = resolved.decided(dataset.seq());
        attention::settle(resolved.task, &mut config)?;
        let device = OpenDevice::in_group(resolved.device(), job.group())?;
        fit_evaluation(&resolved, &mut config);
        if let Some(resumed) = &resumed {
            resumed.keep_head_chunk(&mut config)?;
        }
        resolved.config = chosen(&resolved, config, Holder::Device(&device))?;
        let settings = Settings::new(&resolved.config)?;
        let algorithms = device.settle_algorithms(&settings)?;
        let cudnn_version = cudnn_version(settings.attention);
        if let Some(resumed) = &mut resumed {
            resolved.name = resumed.state().name.clone();
            let libraries = [algorithms.as_deref(), cudnn_version.as_deref()];
            resumed.compare(&resolved, &dataset.fingerprint(), libraries)?;
        }
        let plan = Plan {
            cudnn_version,
            algorithms,
            ..Plan::with_alternatives(&resolved.config, device.target())?
        };
        let limit = limit(&resolved, &device)?;
        refuse_without_room(&resolved.config, &plan, device.target(), limit)?;
        refuse_beforehand(&resolved)?;
        if resolved.config.log.nvtx {
            device.show_ranges();
        }
        name_paths_for_later(&mut resolved.config);
        Ok(Prepared {
            resolved,
            resumed,
            dataset,
            settings,
            device,
            plan,
            limit,
        })
    }

    /// What evaluates and what saves, with all that they read.
    fn open_companions(&self, job: &Job) -> Result<(Between, Saver), Failure> {
        let (config, options) = (&self.resolved.config, &self.resolved.options);
        let resumed = self.resumed.as_ref();
        let from = resumed
            .map(Resumed::folder)
            .or(options.init_from.as_deref());
        let data = config.data.path.as_deref();
        let between = Between::open(&self.resolved, &self.settings, from, data)?;
        let evaluated = between.fingerprint();
        let best = resumed.and_then(|resumed| resumed.best(evaluated.as_deref()));
        let saver = Saver::new(origin(from, data)?, best, job.group());
        if let Some(folder) = &options.save_final {
            refuse_model(folder, saver.origin().names())?;
        }
        Ok((between, saver))
    }
}

/// A run may be resumed from another folder: what is written down of its data says where that is.
fn name_paths_for_later(config: &mut Config) {
    let states = match &mut config.offload.optimizer {
        OptimizerPlace::Folder(folder) => Some(folder),
        _ => None,
    };
    let algorithms = &mut config.hardware.algorithms;
    let algorithms = algorithms
        .as_mut()
        .filter(|path| *path != Path::new(HEURISTIC));
    let paths = [
        &mut config.data.path,
        &mut config.eval.path,
        &mut config.offload.path,
    ];
    for path in paths.into_iter().flatten().chain(states).chain(algorithms) {
        if let Ok(absolute) = std::path::absolute(&*path) {
            *path = absolute;
        }
    }
}

/// Refuses what would fail later.
fn refuse_beforehand(resolved: &Resolved) -> Result<(), Failure> {
    if let Some(Some(_)) = resolved.options.trace {
        return Err(Failure::Usage(
            "train draws into its run directory; write --trace without a folder, and name the run's with --out".into(),
        ));
    }
    Ok(())
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
    job: Rc<Job>,
    resolved: Resolved,
    device: OpenDevice,
    plan: Plan,
    /// The limit on live device bytes.
    limit: Option<u64>,
    directory: RunDir,
    records: Records,
    interrupt: Interrupt,
    saver: Saver,
    between: Between,
    /// The first sample after the last step.
    position: Position,
    data_fingerprint: String,
    /// An evaluation after the last step was broken off, and is still due.
    is_pending: bool,
    /// Steps that are not recorded yet.
    asked: VecDeque<Asked>,
    /// Where pictures are wanted.
    tracer: Option<Tracer>,
    /// It was said that the driver makes no graphs.
    is_told_of_graphs: bool,
    made: Made,
}

/// What is known of a step before it is made.
#[derive(Clone, Copy, Default)]
struct Asked {
    /// How long it waited for its data.
    data_wait: Duration,
    /// Tokens of all ranks, masked ones included.
    tokens: usize,
    /// Targets that are this rank's.
    own_targets: usize,
}

impl Asked {
    fn of(job: &Job, batch: &StepBatch, data_wait: Duration) -> Asked {
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
struct Made {
    /// Steps that a checkpoint brought along.
    before: usize,
    steps: usize,
    skipped: usize,
    skipped_in_a_row: usize,
    /// Tokens read, masked ones included, and those of them that were targets.
    tokens: u64,
    targets: u64,
    /// Tokens of this process, and the time of its steps.
    tokens_here: u64,
    time: Duration,
    /// When the last step was known to be done.
    until: Instant,
    last: Option<StepOutcome>,
}

impl Made {
    /// What a checkpoint holds, or nothing.
    fn after(state: Option<&TrainerState>) -> Made {
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
    fn lap(&mut self, done_at: Instant) -> Duration {
        let before = std::mem::replace(&mut self.until, done_at);
        done_at.saturating_duration_since(before)
    }

    fn add(&mut self, outcome: &StepOutcome, tokens: usize, elapsed: Duration) {
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

impl Run {
    /// Opens the run directory and everything that is written there; the rest of what was prepared is for its steps.
    fn open(
        job: &Rc<Job>,
        prepared: Prepared,
    ) -> Result<(Run, Settings, Dataset, Option<Resumed>), Failure> {
        let (between, saver) = job.agree(prepared.open_companions(job))?;
        let evaluated = between.fingerprint();
        let evaluated = evaluated.map(|data| ("the evaluation data".into(), data));
        job.compare(&evaluated.into_iter().collect())?;
        let Prepared {
            resolved,
            resumed,
            dataset,
            settings,
            device,
            plan,
            limit,
        } = prepared;
        let state = resumed.as_ref().map(Resumed::state);
        let made = Made::after(state);
        let run = resumed.as_ref().and_then(Resumed::run);
        let directory = RunDir::open(job, &resolved, &plan, run)?;
        let goes_on = run.is_some();
        let records = Records::open(job, &directory, &resolved, (made.steps, goes_on));
        let interrupt = Interrupt::new().map_err(|error| Failure::Device(error.to_string()));
        let mut run = Run {
            records: job.agree(records)?,
            interrupt: job.agree(interrupt)?,
            position: Position::default(),
            data_fingerprint: dataset.fingerprint(),
            is_pending: state.is_some_and(|state| state.pending),
            asked: VecDeque::new(),
            job: job.clone(),
            resolved,
            device,
            plan,
            limit,
            directory,
            saver,
            between,
            tracer: None,
            is_told_of_graphs: false,
            made,
        };
        let begun = job.agree(run.begin(goes_on));
        begun.map(|()| (run, settings, dataset, resumed))
    }

    /// Writes what precedes the first step.
    fn begin(&mut self, goes_on: bool) -> Result<(), Failure> {
        let is_worth_it = self.resolved.config.batch.accum >= GRAPHS_FROM_ACCUM;
        if let (Some(reason), "cuda", true) = (self.plan.graphs_off, self.plan.device, is_worth_it)
        {
            tracing::info!("no micro-batch is a CUDA graph: {reason}");
        }
        if let (true, Some(folder)) = (self.job.leads(), &self.resolved.options.save_final) {
            make_folder(folder, "--save-final")?;
        }
        match goes_on {
            true => Ok(()),
            false => self.records.write(&self.run_record()),
        }
    }

    /// Goes on in the checkpoint's place. Until here a run that cannot is as it was.
    fn go_on(&mut self, resumed: &Resumed) -> Result<(), Failure> {
        if resumed.run().is_some() {
            self.records.cut(self.made.steps)?;
        }
        if resumed.run().is_some() && self.job.leads() {
            self.directory.describe(&self.resolved, &self.plan)?;
            resumed.set_aside_later()?;
        }
        self.records.write(&ResumeRecord {
            step: self.made.steps,
            from: resumed.folder().display().to_string(),
            changes: resumed.changes.clone(),
            process: ProcessRecord::current(),
        })
    }

    /// Loads the model and makes all steps.
    fn steps(
        &mut self,
        settings: Settings,
        batches: Batches,
        resumed: Option<&Resumed>,
    ) -> Result<(), Failure> {
        self.position = batches.position();
        let loaded = self.load(settings, resumed);
        let mut session = self.job.agree(loaded)?;
        let begun = resumed.map_or(Ok(()), |resumed| self.go_on(resumed));
        let (folder, made) = (self.directory.path(), self.made.steps);
        let begun = begun.and_then(|()| self.records.begin_events(folder, made));
        self.job.agree(begun)?;
        // Ranks end together, at the end of a step.
        if !self.job.has_ranks() {
            session.stop_when(self.interrupt.watch());
        }
        let progress = self.records.progress.clone();
        session.on_micro_batch(move |done, of| progress.micro_batch(done, of));
        let mut batches = prefetch(batches, self.resolved.config.data.prefetch);
        let made = self.make_steps(&mut session, &mut batches);
        if let Some(tracer) = &mut self.tracer {
            tracer.stop();
        }
        if let Err(failure) = made.as_ref()
            && self.job.ends_others(failure)
        {
            self.job.leave_words(failure);
            // Its queues may wait for what other ranks will never send, and dropping it would wait for them.
            std::mem::forget(session);
            return made;
        }
        // The last step may still be at work, whatever ended the run.
        let last = session.finish_step();
        let last = last.map_err(Failure::from);
        let recorded = last.and_then(|last| self.record(last));
        let made = made.and(recorded);
        if self.job.has_ranks() && made.as_ref().is_err_and(Failure::is_of_all) {
            // All finish a save that is under way; why the run ends says more than how that went.
            let _ = self.finish_saves();
        }
        made?;
        if let Some(folder) = &self.resolved.options.save_final {
            let exported = session.export(folder, self.saver.origin());
            self.job.agree(exported.map_err(Failure::from))?;
        }
        self.finish_saves()?;
        match &self.made.last {
            Some(last) if !last.is_finite() => Err(self.diverged(last)),
            _ => Ok(()),
        }
    }

    /// Says once that micro-batches are not launched at once, where the plan has it.
    fn warn_of_graphs(&mut self, session: &Session) {
        if self.is_told_of_graphs || !self.plan.graphs {
            return;
        }
        if let Some(refusal) = session.graphs_refusal() {
            tracing::warn!(
                "the driver makes no graph of a micro-batch ({refusal}); training goes on without, with the same results \
                 (train.graphs = \"off\" does not try)"
            );
            self.is_told_of_graphs = true;
        }
    }

    /// Asks for step after step; each is recorded when it is known to be done.
    fn make_steps(
        &mut self,
        session: &mut Session,
        batches: &mut Prefetched,
    ) -> Result<(), Failure> {
        if self.is_pending {
            self.between_steps(session, self.made.steps)?;
        }
        self.made.until = Instant::now();
        let mut step = self.made.steps + 1;
        while step <= self.resolved.config.train.steps || self.is_pending {
            if let Some(told) = self.job.signal(self.interrupt.signal())? {
                return Err(self.interrupted(session, told));
            }
            let batch = batches.next_step()?;
            let asked = Asked::of(&self.job, &batch, batches.data_wait());
            self.asked.push_back(asked);
            if let Some(tracer) = &self.tracer {
                tracer.begin_step();
            }
            match session.start_step(&batch) {
                // The signal that broke it off is seen at once, with the state after the step before.
                Err(SessionError::Stopped) => continue,
                started => started?,
            }
            self.job.note_step(step);
            self.position = batches.position();
            self.warn_of_graphs(session);
            self.record(session.take_finished())?;
            if self.resolved.options.dump_gradients == Some(step as u64) {
                session.export_gradients(&self.directory.gradients(step)?)?;
            }
            self.between_steps(session, step)?;
            self.go_on_saving()?;
            step += 1;
        }
        Ok(())
    }

    /// Saves what a signal interrupted, to this rank or another.
    fn interrupted(
        &mut self,
        session: &mut Session,
        (signal, rank): (i32, Option<usize>),
    ) -> Failure {
        let mut save = || {
            let last = session.finish_step()?;
            self.record(last)?;
            self.save_now(session)
        };
        match save() {
            Ok(checkpoint) => Failure::Interrupted {
                rank,
                step: self.made.steps,
                signal,
                checkpoint,
            },
            Err(failure) => failure,
        }
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
        let planned = (self.plan.most_bytes(), self.plan.reserved_bytes);
        let over = self.limit.filter(|limit| planned.0 > *limit);
        let by_limit = over.map(|limit| first_refused(settings, self.device.target(), limit));
        let by_device = self.device.first_refused(settings, planned)?;
        match by_limit.transpose()?.flatten().or(by_device) {
            None => Ok(()),
            Some(error) => Err(Failure::from(error)),
        }
    }

    /// Leases everything that lives across steps, fills the weights, and reserves the slab.
    fn load(&mut self, settings: Settings, resumed: Option<&Resumed>) -> Result<Session, Failure> {
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
            match (resumed, &self.resolved.options.init_from) {
                (Some(resumed), _) => resumed.restore(&mut session, &self.resolved.config)?,
                (None, Some(folder)) => session.import(folder)?,
                (None, None) => session.initialise(self.resolved.config.train.seed)?,
            }
        }
        memory.reserve_slab(self.plan.slab_bytes)?;
        Ok(session)
    }

    /// Says beforehand if the plan is above the limit, and what may take a while.
    fn announce(&self) {
        let planned = self.plan.most_bytes();
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
