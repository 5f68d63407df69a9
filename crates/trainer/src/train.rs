//! The `train` command: plan, load, loop, summary.

mod ending;
mod evaluating;
mod evaluation_inputs;
mod loading;
mod preparing;
mod rank_facts;
mod recording;
mod records;
mod resuming;
mod room;
mod saver;
mod saving;
mod totals;

// What the library takes of a run.
pub(crate) use totals::{StepInputs, Totals};
#[cfg(feature = "candle")]
pub(crate) use {
    loading::narrower_type,
    preparing::{BATCHES_OF_A_PROGRAM, is_of_a_program},
    recording::step_record,
    resuming::restore,
};

use crate::adapters::BaseModel;
use crate::decisions::Decided;
use crate::device::{DeviceStep, OpenDevice};
use crate::failure::{Failure, Result};
use crate::interrupt::Interrupt;
use crate::job::{Begun, FailedCommand, Job, together};
#[cfg(feature = "cuda")]
use crate::kernel_kinds::try_before_ranks_meet;
use crate::model_tokens::{ModelTokens, describe};
use crate::run_dir::{RunDir, make_folder, refuse_model};
use crate::stdout::print;
use crate::threads::start_threads;
use crate::tracer::Tracer;
use crate::whole_model::whole_model;
use checkpoint::ModelLock;
use collectives::Launch;
use data::{Batches, CutDocuments, DataError, Dataset, Inputs, Position, Prefetched, prefetch};
use evaluation_inputs::EvaluationInputs;
use kernels::cuda::KernelKind;
use model::{Architecture, Attention};
use planner::{Plan, StepPeaks};
use preparing::Prepared;
use records::RunRecords;
use report::{METRICS_SCHEMA_VERSION, ProcessRecord, ResumeRecord};
use resuming::Resumed;
use saver::Saver;
use session::{Session, SessionError, StepOutcome};
use settings::{GRAPHS_FROM_ACCUM, Resolved};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

/// Trains a model, or resumes training; as one of several ranks, if a launcher started this process as one.
pub(crate) fn train(resolved: Resolved, launch: Option<&Launch>) -> Result<(), FailedCommand> {
    // `collectives.engine = "alone"` overrides the launcher.
    let launch = launch.filter(|_| resolved.config.rank.is_some());
    start_threads(resolved.config.train.threads)?;
    #[cfg(feature = "cuda")]
    if launch.is_some() {
        try_before_ranks_meet(&resolved);
    }
    let job = Job::start(&resolved.config, resolved.device(), launch)?;
    together(Rc::new(job), |job| train_in(job, resolved))
}

fn train_in(job: &Rc<Job>, resolved: Resolved) -> Result {
    job.compare(&rank_facts::asked_for(&resolved.options))?;
    let prepared = job.agree(Prepared::new(job, resolved))?;
    let prepared = prepared.agree_on_kernels(job)?;
    job.compare(&prepared.facts(job)?)?;
    if job.size() > 1 {
        let seconds = prepared.seconds_on_paper().map_err(Failure::from);
        job.wait_for_steps(job.agree(seconds)?)?;
    }
    let (mut run, step, dataset, resumed) = Run::open(job, prepared)?;
    let from = resumed.as_ref().map_or(String::new(), Resumed::describe);
    tracing::info!("training on {}{from}", describe(&dataset));
    if let Some(warning) = dataset.describe_cut_documents() {
        tracing::warn!("{warning}");
    }
    let batches = match &resumed {
        None => dataset.batches(),
        Some(resumed) => resumed.seek(dataset)?,
    };
    let batches = match &step.settings.ranks {
        Some(_) => {
            let rank = step.settings.rank();
            let sharing = step.settings.sharing().rank.of;
            let reading = batches.of_rank(rank.number / sharing, rank.of / sharing);
            reading.in_parts(step.settings.own_parts())
        }
        None => batches,
    };
    let outcome = run
        .steps(step, batches, resumed.as_ref())
        .map_err(|failure| run.explain(failure));
    run.records.progress.finish();
    let ended = run.write_end_record(outcome.as_ref().err());
    run.draw(outcome.as_ref().err());
    // The run's failure is more important than a failure to write the last line.
    if let Err(failure) = outcome {
        if job.ends_others(&failure) {
            // Dropping the device waits for its queues, which may wait for other ranks.
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

/// A run under way.
struct Run {
    job: Rc<Job>,
    decided: Decided,
    /// Folder for the trained model.
    save_final: Option<PathBuf>,
    device: OpenDevice,
    plan: Plan,
    peaks: StepPeaks,
    /// The limit on live device bytes.
    limit: Option<u64>,
    directory: RunDir,
    /// Keeps other commands out of the folder of `--save-final`.
    _model_lock: Option<ModelLock>,
    records: RunRecords,
    interrupt: Interrupt,
    saver: Saver,
    evaluation_inputs: EvaluationInputs,
    /// The first sample after the last step.
    position: Position,
    data_fingerprint: String,
    /// Number of samples in a pass over the data.
    samples: usize,
    /// Whether the user was told that the data is read again.
    is_told_of_pass: bool,
    /// Whether each byte of a text is a token.
    reads_bytes: bool,
    /// Whether the evaluation after the last step was interrupted, and is still to be made.
    is_pending: bool,
    /// Steps that were started and are not recorded yet.
    asked: VecDeque<StepInputs>,
    /// The tracer, if pictures are wanted.
    tracer: Option<Tracer>,
    /// Whether the user was told that the driver makes no graphs.
    is_told_of_graphs: bool,
    /// The model under adapters, if there are some.
    base: Option<BaseModel>,
    made: Totals,
}

impl Run {
    /// Opens the run directory and all files in it. Returns what the steps need of `prepared`.
    fn open(
        job: &Rc<Job>,
        mut prepared: Prepared,
    ) -> Result<(Run, DeviceStep, Dataset, Option<Resumed>)> {
        let (evaluation_inputs, mut saver) = job.agree(prepared.open_companions(job))?;
        let evaluated = evaluation_inputs.fingerprint();
        let evaluated = evaluated.map(|data| ("the evaluation data".into(), data));
        job.compare(&evaluated.into_iter().collect())?;
        prepared.keep_or_refuse_final_model(job, saver.origin())?;
        saver.checkpoint_bytes = prepared.refuse_without_room_to_save(job, &saver)?;
        let Prepared {
            decided,
            save_final,
            resumed,
            dataset,
            tokens,
            device,
            step,
            plan,
            limit,
        } = prepared;
        let state = resumed.as_ref().map(Resumed::state);
        let made = Totals::after(state);
        let run = resumed.as_ref().and_then(Resumed::run);
        let directory = RunDir::open(job, &decided, &plan, run)?;
        let goes_on = run.is_some();
        let records = RunRecords::open(job, &directory, &decided, (made.steps, goes_on));
        let interrupt = Interrupt::new().map_err(|error| Failure::Device(error.to_string()));
        let mut run = Run {
            records: job.agree(records)?,
            interrupt: job.agree(interrupt)?,
            position: Position::default(),
            data_fingerprint: dataset.fingerprint(),
            peaks: StepPeaks::new(&step.settings, device.target(), &plan),
            samples: dataset.samples(),
            is_told_of_pass: false,
            reads_bytes: tokens == ModelTokens::Bytes,
            is_pending: state.is_some_and(|state| state.pending),
            asked: VecDeque::new(),
            job: job.clone(),
            decided,
            save_final,
            device,
            plan,
            limit,
            directory,
            saver,
            evaluation_inputs,
            tracer: None,
            is_told_of_graphs: false,
            _model_lock: None,
            base: None,
            made,
        };
        let begun = job.agree(run.begin(goes_on));
        begun.map(|()| (run, step, dataset, resumed))
    }

    /// Writes what comes before the first step.
    fn begin(&mut self, goes_on: bool) -> Result {
        let is_worth_it = self.decided.config.batch.accum >= GRAPHS_FROM_ACCUM;
        if let (Some(reason), "cuda", true) = (self.plan.graphs_off, self.plan.device, is_worth_it)
        {
            tracing::info!("no micro-batch is a CUDA graph: {reason}");
        }
        if let (true, Some(folder)) = (self.job.leads(), &self.save_final) {
            make_folder(folder, "--save-final")?;
            self._model_lock = Some(ModelLock::take(folder, "--save-final")?);
            // Another command may have written there before it was locked.
            refuse_model(folder, self.saver.origin().names())?;
        }
        self.tell_what_is_saved();
        match goes_on {
            true => Ok(()),
            false => self.records.write(&self.run_record()),
        }
    }

    /// Resumes in the checkpoint's run. Before this, nothing of that run has been changed.
    fn go_on(&mut self, resumed: &Resumed) -> Result {
        if resumed.run().is_some() {
            self.records.cut(self.made.steps)?;
        }
        if resumed.run().is_some() && self.job.leads() {
            self.directory.describe(&self.decided, &self.plan)?;
            resumed.set_aside_later()?;
        }
        let kinds = self.device.kernel_kinds();
        self.records.write(&ResumeRecord {
            schema_version: METRICS_SCHEMA_VERSION,
            step: self.made.steps,
            from: resumed.folder().display().to_string(),
            changes: resumed.changes.clone(),
            attention_kernels: kinds.taken.attention.map(KernelKind::name),
            experts_kernels: kinds.taken.experts.map(KernelKind::name),
            kernels_given_up: kinds.reason(),
            process: ProcessRecord::current(),
        })
    }

    /// Loads the model and makes all steps.
    fn steps(&mut self, step: DeviceStep, batches: Batches, resumed: Option<&Resumed>) -> Result {
        self.position = batches.position();
        self.is_told_of_pass = self.position.epoch > 0;
        let loaded = self.load(step, resumed);
        let mut session = self.job.agree(loaded)?;
        let begun = resumed.map_or(Ok(()), |resumed| self.go_on(resumed));
        let (folder, made) = (self.directory.path(), self.made.steps);
        let begun = begun.and_then(|()| self.records.begin_events(folder, made));
        self.job.agree(begun)?;
        // Ranks stop together, at the end of a step.
        if !self.job.has_ranks() {
            session.stop_when(self.interrupt.watch());
        }
        let (progress, job) = (self.records.progress.clone(), self.job.clone());
        session.on_micro_batch(move |done, of| {
            job.note_micro_batches(done);
            progress.micro_batch(done, of);
        });
        let mut batches = prefetch(batches, self.decided.config.data.prefetch);
        let made = self.make_and_finish(&mut session, &mut batches);
        if let Err(failure) = made.as_ref()
            && self.job.ends_others(failure)
        {
            self.job.leave_words(failure);
            // Dropping it would wait for its queues, which may wait for other ranks forever.
            std::mem::forget(session);
        }
        made
    }

    /// Makes all steps, and writes what is left to write.
    fn make_and_finish(&mut self, session: &mut Session, batches: &mut Prefetched) -> Result {
        let made = self.make_steps(session, batches);
        if let Some(tracer) = &mut self.tracer {
            tracer.stop();
        }
        if made
            .as_ref()
            .is_err_and(|failure| self.job.ends_others(failure))
        {
            return made;
        }
        // The last step may still be running, whatever ended the run.
        let last = session.finish_step();
        let last = last.map_err(Failure::from);
        let recorded = last.and_then(|last| self.record(last));
        let made = made.and(recorded);
        if made
            .as_ref()
            .is_err_and(|failure| self.job.all_know(failure))
        {
            // All ranks finish a save under way. Its outcome is ignored, because the run's failure says more.
            let _ = self.finish_saves();
        }
        made?;
        // The checkpoint is finished first, so that no training is lost if the model cannot be written.
        let saved = self.finish_saves();
        let exported = self.export(session);
        if let (Err(unsaved), Err(_), true) = (&saved, &exported, self.job.has_ranks()) {
            tracing::warn!("nor could the last checkpoint be written: {unsaved}");
        }
        exported?;
        saved?;
        match &self.made.last {
            Some(last) if !last.is_finite() => Err(self.diverged(last)),
            _ => Ok(()),
        }
    }

    /// Writes the model to `--save-final`. If that fails, a single process saves its state, unless it is saved already.
    /// Several ranks end with the failure.
    fn export(&mut self, session: &mut Session) -> Result {
        let Some(folder) = &self.save_final else {
            return Ok(());
        };
        let files = self.model_files(session);
        let architecture = Architecture::of(&self.decided.config.model, Attention::default());
        let left_out = self.saver.left_out.as_ref().filter(|_| self.job.leads());
        let whole = whole_model(left_out, &architecture.parameters);
        let exported = session.export(folder, &files, whole.as_ref());
        let exported = self.job.agree(exported.map_err(Failure::from));
        if exported.is_err() && !self.job.has_ranks() {
            match self.save_now(session) {
                Ok(checkpoint) => tracing::warn!(
                    "the model could not be written; the training is in {}, of which `trainer export` makes it",
                    checkpoint.display()
                ),
                Err(failure) => tracing::warn!("nor could a checkpoint be written: {failure}"),
            }
        }
        exported
    }

    /// Warns once if the plan has CUDA graphs but the driver makes none.
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

    /// Starts step after step. Each is recorded once it is known to be done.
    fn make_steps(&mut self, session: &mut Session, batches: &mut Prefetched) -> Result {
        if self.is_pending {
            self.between_steps(session, self.made.steps)?;
        }
        self.made.until = Instant::now();
        let mut step = self.made.steps + 1;
        while step <= self.decided.config.train.steps || self.is_pending {
            let read = batches.next_step();
            let batch = match self.job.begin_step(self.interrupt.signal(), read)? {
                Begun::Step(batch) => batch,
                Begun::Signal(told) => return Err(self.interrupted(session, told)),
            };
            if batch.target_count() == 0 {
                return Err(self.without_targets());
            }
            let read = (batches.position(), self.samples);
            let settings = session.settings();
            let asked = StepInputs::of(
                (settings.rank(), settings.own_parts().count),
                &batch,
                batches.data_wait(),
                read,
            );
            self.asked.push_back(asked);
            self.tell_of_pass(step, batches.position());
            if let Some(tracer) = &self.tracer {
                tracer.begin_step();
            }
            match session.start_step(&batch) {
                // The signal that interrupted it is handled next, with the state of the step before.
                Err(SessionError::Stopped) => continue,
                started => started?,
            }
            self.job.note_step(step);
            self.position = batches.position();
            self.warn_of_graphs(session);
            self.record(session.take_finished())?;
            if self.decided.options.dump_gradients == Some(step as u64) {
                session.export_gradients(&self.directory.gradients(step)?)?;
            }
            self.between_steps(session, step)?;
            self.go_on_saving()?;
            step += 1;
        }
        Ok(())
    }

    /// Reports once that samples repeat. `next` is the sample after those of the step.
    fn tell_of_pass(&mut self, step: usize, next: Position) {
        let is_again = next.epoch > 1 || (next.epoch == 1 && next.index > 0);
        if is_again && !self.is_told_of_pass {
            self.is_told_of_pass = true;
            tracing::info!(
                "step {step}: all {} samples of the data have been read, and a second pass begins",
                self.samples
            );
        }
    }

    /// Saves after a signal, to this rank or another one.
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

    /// The failure for a step without targets, which only all ranks together detect; a single process does so earlier.
    fn without_targets(&self) -> Failure {
        let (config, Position { epoch, index }) = (&self.decided.config, self.position);
        let last = index as usize + config.batch.micro * config.micro_batches() - 1;
        let paths = config.data.path.iter().flat_map(Inputs::paths);
        let paths: Vec<String> = paths.map(|path| path.display().to_string()).collect();
        self.job.end_together();
        Failure::Data(DataError::NoTargets {
            file: paths.join(", "),
            samples: format!("{index} to {last} of the epoch's order"),
            epoch,
            cut: CutDocuments::default(),
        })
    }

    fn diverged(&self, outcome: &StepOutcome) -> Failure {
        let options = &self.decided.options;
        Failure::Diverged {
            start: match (&options.lora_from, &options.init_from) {
                (Some(_), _) => "--lora-from, and at the model under it",
                (None, Some(_)) => "--init-from",
                (None, None) => "model.init_std",
            },
            step: outcome.step,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm,
            skipped: self.made.skipped_in_a_row,
        }
    }
}
