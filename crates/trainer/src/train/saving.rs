//! When and how a run saves its state.

use super::Run;
use super::saver::{Checkpointing, Old, Writer};
use crate::adapters::model_files;
use crate::failure::Result;
use checkpoint::{FORMAT_VERSION, FORMAT_VERSION_OF_RANKS, OptimizerForm, TrainerState};
use memory::format_bytes;
use report::{CheckpointRecord, milliseconds};
use session::Session;
use std::path::PathBuf;
use std::time::Instant;

impl Run {
    /// Saves the state after the last step, in the background if the host has a copy. If the save fails, the run warns
    /// and continues.
    pub(super) fn save(&mut self, session: &mut Session) -> Result {
        let begun = Instant::now();
        self.begin_save(session)?;
        self.records.note(&CheckpointRecord {
            step: self.made.steps,
            stall_ms: milliseconds(begun.elapsed()),
        });
        Ok(())
    }

    fn begin_save(&mut self, session: &mut Session) -> Result {
        self.saver.poll()?;
        if self.saver.last == Some(self.made.steps) {
            return Ok(());
        }
        if let Writer::Ranks(_) = self.saver.writer {
            // A save under way would treat this one's folder as a leftover.
            self.saver.wait()?;
        }
        let checkpointing = self.checkpointing(session)?;
        self.saver.last = Some(self.made.steps);
        let copy = session.copy_state()?;
        let outcome = match (&mut self.saver.writer, copy) {
            (Writer::Ranks(joint), Some(copy)) => {
                let checkpoint = checkpointing.of_ranks();
                let begun = joint.begin(checkpoint, move |part| part.write(&copy.state()));
                begun.err().map(Err)
            }
            (Writer::Ranks(joint), None) => {
                Some(joint.save(checkpointing.of_ranks(), &session.state()))
            }
            (Writer::Alone(_), None) => Some(checkpointing.write(&session.state())),
            (Writer::Alone(writer), Some(copy)) => {
                match writer.start(move || checkpointing.write(&copy.state())) {
                    Ok(before) => before,
                    // The system has no more threads, so training waits for the save.
                    Err(_) => {
                        self.saver.wait()?;
                        let checkpointing = self.checkpointing(session)?;
                        Some(checkpointing.write(&session.state()))
                    }
                }
            }
        };
        self.saver.note(outcome)
    }

    /// Continues a save that ranks make beside their steps. Called after each step.
    pub(super) fn go_on_saving(&mut self) -> Result {
        match &self.saver.writer {
            Writer::Ranks(_) => self.saver.poll(),
            Writer::Alone(_) => Ok(()),
        }
    }

    /// Waits for the save under way, on all ranks.
    ///
    /// # Errors
    /// If the last save failed, because no later save replaces it.
    pub(super) fn finish_saves(&mut self) -> Result {
        let finished = self.saver.finish();
        self.job.agree(finished)
    }

    /// Saves the state after the last step and waits for it, unless it is saved already; returns the folder.
    pub(super) fn save_now(&mut self, session: &Session) -> Result<PathBuf> {
        // Two saves at a time would treat each other's unfinished folder as a leftover.
        self.saver.wait()?;
        let is_saved = self.saver.last == Some(self.made.steps) && self.saver.failure.is_none();
        if let (true, Some(folder)) = (is_saved, self.saver.newest()) {
            return Ok(folder.into());
        }
        let checkpointing = self.checkpointing(session)?;
        let state = session.state();
        let outcome = match &mut self.saver.writer {
            Writer::Ranks(joint) => joint.save(checkpointing.of_ranks(), &state),
            Writer::Alone(_) => checkpointing.write(&state),
        };
        Ok(outcome?)
    }

    /// Reports which steps will be saved, and where.
    pub(super) fn tell_what_is_saved(&self) {
        let config = &self.decided.config;
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

    fn checkpointing(&self, session: &Session) -> Result<Checkpointing> {
        let config = &self.decided.config;
        let mut files = self.model_files(session);
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

    /// The files that are saved with the model.
    pub(super) fn model_files(&self, session: &Session) -> Vec<(String, Vec<u8>)> {
        let (origin, config) = (self.saver.origin(), &self.decided.config);
        model_files(session, origin, self.base.as_ref(), config)
    }

    fn trainer_state(&self, session: &Session) -> TrainerState {
        let (made, optim) = (&self.made, &self.decided.config.optim);
        let (step, updates) = session.progress();
        let ranks = (self.job.size() > 1).then(|| self.job.size() as u64);
        let kernels = self.device.kernel_kinds().taken;
        TrainerState {
            format_version: match ranks {
                None => FORMAT_VERSION,
                Some(_) => FORMAT_VERSION_OF_RANKS,
            },
            trainer_version: env!("CARGO_PKG_VERSION").into(),
            name: self.decided.name.clone(),
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
            attention_kernels: kernels.attention.map(|kind| kind.to_string()),
            experts_kernels: kernels.experts.map(|kind| kind.to_string()),
            reads_bytes: self.reads_bytes,
            origin_dtype: self.saver.origin_dtype.clone(),
            left_out: self.saver.left_out.clone(),
            ranks,
        }
    }
}
