//! Checkpoints of a run: written in the background from a copy on the host, or while training waits; by one process, or by all
//! ranks.

use super::Run;
use crate::failure::Failure;
use checkpoint::{
    BackgroundWriter, Best, CheckpointError, Contents, FORMAT_VERSION, FORMAT_VERSION_OF_RANKS,
    JointCheckpoint, JointSaver, OptimizerForm, TrainerState, keep, save,
};
use collectives::Group;
use files::Disk;
use memory::format_bytes;
use model::{MAX_SHARD_BYTES, Origin};
use report::{CheckpointRecord, milliseconds};
use session::{Session, SessionState};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// What saves a run.
pub(super) struct Saver {
    writer: BackgroundWriter<Outcome>,
    /// Where several ranks save together; then the writer has nothing to do.
    joint: Option<JointSaver>,
    /// What came with the model, and goes out with it.
    origin: Origin,
    /// The last step that was saved, or is being saved.
    last: Option<usize>,
    /// Why the last save failed.
    failure: Option<CheckpointError>,
    /// The last checkpoint that is whole.
    newest: Option<PathBuf>,
    /// The evaluation with the lowest loss.
    pub(super) best: Option<Best>,
    /// Bytes of the tensors of a checkpoint, of all ranks.
    pub(super) checkpoint_bytes: u64,
}

/// How a save ended.
type Outcome = Result<PathBuf, CheckpointError>;

/// One checkpoint, but for its tensors.
struct Checkpointing {
    run: PathBuf,
    state: TrainerState,
    files: Vec<(String, Vec<u8>)>,
    old: Old,
}

/// Checkpoints that a new one makes superfluous.
struct Old {
    run: PathBuf,
    /// The step of the new one.
    step: u64,
    /// How many are kept; none: all.
    keep_last: Option<usize>,
    /// The step of one that is kept in any case.
    best: Option<u64>,
}

impl Saver {
    pub(super) fn new(origin: Origin, best: Option<Best>, group: Option<Arc<dyn Group>>) -> Saver {
        let several = group.filter(|group| group.size() > 1);
        Saver {
            writer: BackgroundWriter::new(),
            joint: several.map(|group| JointSaver::new(group, Arc::new(Disk))),
            origin,
            last: None,
            failure: None,
            newest: None,
            best,
            checkpoint_bytes: 0,
        }
    }

    /// What came with the model.
    pub(super) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The last checkpoint that is whole.
    pub(super) fn newest(&self) -> Option<&Path> {
        self.newest.as_deref()
    }

    /// Notes how a save ended. One that failed is told of, and training goes on without it.
    ///
    /// # Errors
    /// If ranks are lost.
    fn note(&mut self, outcome: Option<Outcome>) -> Result<(), Failure> {
        match outcome {
            None => {}
            Some(Ok(folder)) => (self.newest, self.failure) = (Some(folder), None),
            Some(Err(CheckpointError::Group(error))) => return Err(error.into()),
            Some(Err(error)) => {
                let why = if error.is_full() {
                    ", for want of room"
                } else {
                    ""
                };
                if self.joint.as_ref().is_none_or(JointSaver::leads) {
                    tracing::warn!(
                        "no checkpoint was written{why}: {error}; earlier ones are whole, and training goes on"
                    );
                }
                self.failure = Some(error);
            }
        }
        Ok(())
    }

    /// Notes how the save that is under way ended, if it has.
    fn poll(&mut self) -> Result<(), Failure> {
        let outcome = match &mut self.joint {
            Some(joint) => joint.poll(),
            None => self.writer.take_outcome(),
        };
        self.note(outcome)
    }

    /// Waits for the save that is under way, and notes how it ended.
    fn wait(&mut self) -> Result<(), Failure> {
        let outcome = match &mut self.joint {
            Some(joint) => joint.wait(),
            None => self.writer.wait(),
        };
        self.note(outcome)
    }

    /// Waits for the save that is under way.
    ///
    /// # Errors
    /// If the last one failed: none comes after it that could make up for it.
    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        self.wait()?;
        let Some(error) = self.failure.take() else {
            return Ok(());
        };
        // The step is not saved, whatever checkpoint there is.
        self.last = None;
        Err(error.into())
    }
}

impl Checkpointing {
    fn write(&self, state: &SessionState) -> Outcome {
        let contents = Contents {
            state: &self.state,
            model: &state.weights(),
            optimizer: &state.optimizer(),
            files: &self.files,
            max_shard_bytes: MAX_SHARD_BYTES,
        };
        let folder = save(&Disk, &self.run, &contents)?;
        self.old.remove();
        Ok(folder)
    }

    /// The same of several ranks.
    fn of_ranks(self) -> JointCheckpoint {
        let Checkpointing {
            run,
            state,
            files,
            old,
        } = self;
        JointCheckpoint {
            run,
            state,
            files,
            published: Box::new(move || old.remove()),
        }
    }
}

impl Old {
    fn remove(&self) {
        let Some(last) = self.keep_last else { return };
        if let Err(error) = keep(&Disk, &self.run, self.step, last, self.best) {
            tracing::warn!("an old checkpoint could not be removed: {error}");
        }
    }
}

impl Run {
    /// Saves the state after the last step, in the background where there is a copy for it. A save that fails is told of, and
    /// costs no more than itself.
    pub(super) fn save(&mut self, session: &mut Session) -> Result<(), Failure> {
        let begun = Instant::now();
        self.begin_save(session)?;
        self.records.note(&CheckpointRecord {
            step: self.made.steps,
            stall_ms: milliseconds(begun.elapsed()),
        });
        Ok(())
    }

    fn begin_save(&mut self, session: &mut Session) -> Result<(), Failure> {
        self.saver.poll()?;
        if self.saver.last == Some(self.made.steps) {
            return Ok(());
        }
        let checkpointing = self.checkpointing(session)?;
        self.saver.last = Some(self.made.steps);
        match &self.saver.joint {
            Some(_) => self.begin_joint(session, checkpointing),
            None => self.begin_alone(session, checkpointing),
        }
    }

    fn begin_alone(
        &mut self,
        session: &mut Session,
        checkpointing: Checkpointing,
    ) -> Result<(), Failure> {
        let Some(copy) = session.copy_state()? else {
            let state = session.state();
            let outcome = checkpointing.write(&state);
            return self.saver.note(Some(outcome));
        };
        let job = move || checkpointing.write(&copy.state());
        if let Ok(before) = self.saver.writer.start(job) {
            return self.saver.note(before);
        }
        // Where the system has no thread left, training waits.
        self.saver.wait()?;
        let (checkpointing, state) = (self.checkpointing(session)?, session.state());
        let outcome = checkpointing.write(&state);
        self.saver.note(Some(outcome))
    }

    fn begin_joint(
        &mut self,
        session: &mut Session,
        checkpointing: Checkpointing,
    ) -> Result<(), Failure> {
        // Its folder would be taken for a leftover.
        self.saver.wait()?;
        let copy = session.copy_state()?;
        let joint = self.saver.joint.as_mut();
        let (joint, checkpoint) = (
            joint.expect("ranks save together"),
            checkpointing.of_ranks(),
        );
        let outcome = match copy {
            Some(copy) => {
                let begun = joint.begin(checkpoint, move |part| part.write(&copy.state()));
                begun.err().map(Err)
            }
            None => Some(joint.save(checkpoint, &session.state())),
        };
        self.saver.note(outcome)
    }

    /// Goes on with a save that ranks make beside their steps: after each of these.
    pub(super) fn go_on_saving(&mut self) -> Result<(), Failure> {
        match &self.saver.joint {
            Some(_) => self.saver.poll(),
            None => Ok(()),
        }
    }

    /// Waits for the save that is under way, on all ranks.
    ///
    /// # Errors
    /// If the last one failed: none comes after it that could make up for it.
    pub(super) fn finish_saves(&mut self) -> Result<(), Failure> {
        let finished = self.saver.finish();
        self.job.agree(finished)
    }

    /// Saves the state after the last step and waits for it, unless it is saved already; returns where.
    pub(super) fn save_now(&mut self, session: &Session) -> Result<PathBuf, Failure> {
        // Two saves at a time would take each other's unfinished folder for a leftover.
        self.saver.wait()?;
        let is_saved = self.saver.last == Some(self.made.steps) && self.saver.failure.is_none();
        if let (true, Some(folder)) = (is_saved, self.saver.newest()) {
            return Ok(folder.into());
        }
        let checkpointing = self.checkpointing(session)?;
        let state = session.state();
        let outcome = match &mut self.saver.joint {
            Some(joint) => joint.save(checkpointing.of_ranks(), &state),
            None => checkpointing.write(&state),
        };
        Ok(outcome?)
    }

    /// Says which steps will be saved, and where.
    pub(super) fn tell_what_is_saved(&self) {
        let config = &self.resolved.config;
        let (checkpoint, steps) = (&config.checkpoint, config.train.steps);
        if !checkpoint.saves() || self.made.steps >= steps {
            return;
        }
        let folder = self.directory.path().join("checkpoints");
        let (folder, size) = (folder.display(), format_bytes(self.saver.checkpoint_bytes));
        match checkpoint.interval() {
            Some(every) => tracing::info!(
                "every {every} steps and the last one will be saved in {folder} ({size} each)"
            ),
            None => tracing::info!(
                "the last step will be saved in {folder}/step-{steps} ({size}); --save-every N saves others too, 0 none"
            ),
        }
    }

    fn checkpointing(&self, session: &Session) -> Result<Checkpointing, Failure> {
        let config = &self.resolved.config;
        let dtype = session.model().dtype();
        let origin = &self.saver.origin;
        let mut files = origin.files(&config.model, config.data.seq, dtype);
        files.push(("config.toml".into(), config.to_toml()?.into_bytes()));
        let (run, state) = (self.directory.path(), self.trainer_state(session));
        let best = state.best.as_ref().filter(|_| config.checkpoint.keep_best);
        let old = Old {
            run: run.into(),
            step: state.step,
            keep_last: config.checkpoint.keep_last,
            best: best.map(|best| best.step),
        };
        Ok(Checkpointing {
            run: run.into(),
            state,
            files,
            old,
        })
    }

    fn trainer_state(&self, session: &Session) -> TrainerState {
        let (made, optim) = (&self.made, &self.resolved.config.optim);
        let (step, updates) = session.progress();
        let ranks = (self.job.size() > 1).then(|| self.job.size() as u64);
        TrainerState {
            format_version: match ranks {
                None => FORMAT_VERSION,
                Some(_) => FORMAT_VERSION_OF_RANKS,
            },
            trainer_version: env!("CARGO_PKG_VERSION").into(),
            name: self.resolved.name.clone(),
            step: step as u64,
            updates: updates as u64,
            skipped_in_a_row: made.skipped_in_a_row as u64,
            skipped: made.skipped as u64,
            position: self.position,
            data: self.data_fingerprint.clone(),
            tokens: made.tokens,
            targets: made.targets,
            pending: self.is_pending,
            best: self.saver.best.clone(),
            optimizer: OptimizerForm {
                weights: self.plan.dtype.into(),
                state_dtype: optim.state_dtype.to_string(),
                master: optim.master.to_string(),
            },
            algorithms: self.plan.algorithms.clone(),
            cudnn_version: self.plan.cudnn_version.clone(),
            reads_bytes: self.reads_bytes,
            ranks,
        }
    }
}

/// What goes out with the model of a run: what came with the model that it starts from, and the tokenizer of its data where
/// that has none.
pub(super) fn origin(from: Option<&Path>, data: Option<&Path>) -> Result<Origin, Failure> {
    let origin = from.map(Origin::read).transpose()?.unwrap_or_default();
    match data {
        Some(folder) => Ok(origin.with_tokenizer_from(folder)?),
        None => Ok(origin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Or else the checkpoint before would be taken for that of the last step.
    #[test]
    fn a_step_whose_save_failed_is_not_saved() {
        let mut saver = Saver::new(Origin::default(), None, None);
        (saver.last, saver.newest) = (Some(4), Some("step-2".into()));
        let error = CheckpointError::Thread(std::io::Error::other("none is left"));
        saver.note(Some(Err(error))).unwrap();
        saver.finish().unwrap_err();
        assert_eq!(saver.last, None);
        saver.finish().unwrap();
    }
}
