//! Writes checkpoints, in the background from a copy on the host, or while training waits; on one rank or on all.

use crate::failure::Result;
use checkpoint::{
    BackgroundWriter, Best, CheckpointError, Contents, JointCheckpoint, JointSaver, LeftOutWeights,
    TrainerState, keep, save,
};
use collectives::Group;
use files::Disk;
use model::{MAX_SHARD_BYTES, Origin};
use session::SessionState;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Saves a run.
pub(super) struct Saver {
    pub(super) writer: Writer,
    /// The files that came with the model and are saved with it.
    origin: Origin,
    /// The type of the weights in the folder that the run started from, if it is narrower than the run's.
    pub(super) origin_dtype: Option<String>,
    /// What exports copy from the folder that the run started from.
    pub(super) left_out: Option<LeftOutWeights>,
    /// The last step that was saved or is being saved.
    pub(super) last: Option<usize>,
    /// Why the last save failed.
    pub(super) failure: Option<CheckpointError>,
    /// The last whole checkpoint.
    newest: Option<PathBuf>,
    /// The evaluation with the lowest loss.
    pub(super) best: Option<Best>,
    /// Bytes of a checkpoint's tensors, of all ranks together.
    pub(super) checkpoint_bytes: u64,
}

/// Writes checkpoints of a single process, or of several ranks together.
pub(super) enum Writer {
    Alone(BackgroundWriter<Outcome>),
    Ranks(Box<JointSaver>),
}

/// The outcome of a save.
type Outcome = Result<PathBuf, CheckpointError>;

/// A checkpoint without its tensors.
pub(super) struct Checkpointing {
    pub(super) run: PathBuf,
    pub(super) state: TrainerState,
    pub(super) files: Vec<(String, Vec<u8>)>,
    pub(super) old: Old,
}

/// Which older checkpoints to remove after a save.
pub(super) struct Old {
    pub(super) run: PathBuf,
    /// The step of the new checkpoint.
    pub(super) step: u64,
    /// How many are kept; `None`: all.
    pub(super) keep_last: Option<usize>,
    /// The step of a checkpoint that is always kept.
    pub(super) best: Option<u64>,
}

impl Saver {
    pub(super) fn new(origin: Origin, best: Option<Best>, group: Option<Arc<dyn Group>>) -> Saver {
        let writer = match group.filter(|group| group.size() > 1) {
            Some(group) => Writer::Ranks(Box::new(JointSaver::new(group, Arc::new(Disk)))),
            None => Writer::Alone(BackgroundWriter::new()),
        };
        Saver {
            writer,
            origin,
            origin_dtype: None,
            left_out: None,
            last: None,
            failure: None,
            newest: None,
            best,
            checkpoint_bytes: 0,
        }
    }

    /// The files that came with the model.
    pub(super) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The last whole checkpoint.
    pub(super) fn newest(&self) -> Option<&Path> {
        self.newest.as_deref()
    }

    /// Records the outcome of a save. A failure is a warning, and training continues.
    ///
    /// # Errors
    /// If ranks are lost.
    pub(super) fn note(&mut self, outcome: Option<Outcome>) -> Result {
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
                let leads = match &self.writer {
                    Writer::Alone(_) => true,
                    Writer::Ranks(joint) => joint.leads(),
                };
                if leads {
                    tracing::warn!(
                        "no checkpoint was written{why}: {error}; earlier ones are whole, and training goes on"
                    );
                }
                self.failure = Some(error);
            }
        }
        Ok(())
    }

    /// Records the outcome of the save under way, if it has ended.
    pub(super) fn poll(&mut self) -> Result {
        let outcome = match &mut self.writer {
            Writer::Alone(writer) => writer.take_outcome(),
            Writer::Ranks(joint) => joint.poll(),
        };
        self.note(outcome)
    }

    /// Waits for the save under way, and records its outcome.
    pub(super) fn wait(&mut self) -> Result {
        let outcome = match &mut self.writer {
            Writer::Alone(writer) => writer.wait(),
            Writer::Ranks(joint) => joint.wait(),
        };
        self.note(outcome)
    }

    /// Waits for the save under way.
    ///
    /// # Errors
    /// If the last save failed, because no later save replaces it.
    pub(super) fn finish(&mut self) -> Result {
        self.wait()?;
        let Some(error) = self.failure.take() else {
            return Ok(());
        };
        // The step is not saved, even if an older checkpoint exists.
        self.last = None;
        Err(error.into())
    }
}

impl Checkpointing {
    pub(super) fn write(&self, state: &SessionState) -> Outcome {
        let contents = Contents {
            state: &self.state,
            model: &state.weights(),
            stem: state.stem(),
            optimizer: &state.optimizer(),
            files: &self.files,
            max_shard_bytes: MAX_SHARD_BYTES,
        };
        let folder = save(&Disk, &self.run, &contents)?;
        self.old.remove();
        Ok(folder)
    }

    /// The same checkpoint, to be written by several ranks together.
    pub(super) fn of_ranks(self) -> JointCheckpoint {
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

/// The files to save with a run's model: those of the model that it starts from, and the tokenizer of its data if that
/// model has none.
pub(super) fn origin(from: Option<&Path>, data: Option<&Path>) -> Result<Origin> {
    let origin = from.map(Origin::read).transpose()?.unwrap_or_default();
    match data {
        Some(folder) => Ok(origin.with_tokenizer_from(folder)?),
        None => Ok(origin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise the older checkpoint would be taken for the last step's.
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
