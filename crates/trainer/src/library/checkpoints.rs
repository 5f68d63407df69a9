//! Checkpoints that programs save and load: those of `trainer train`.

use super::Trainer;
use crate::adapters::model_files;
use crate::checkpoints::newest_checkpoint;
use crate::failure::{Failure, Result};
use crate::train::{Totals, restore};
use checkpoint::{Contents, FORMAT_VERSION, OptimizerForm, STATE_FILE, TrainerState, save};
use data::Position;
use files::Disk;
use kernels::cuda::KernelKind;
use memory::{Layer, Phase};
use model::MAX_SHARD_BYTES;
use session::Session;
use std::fs::create_dir_all;
use std::path::{Path, PathBuf};

impl Trainer {
    /// Writes `RUN/checkpoints/step-N`, makes it durable, and returns its folder: weights, optimizer states and counters, with
    /// which [`Trainer::load_checkpoint`] and `trainer train --resume` go on. It has the model in Hugging Face layout too. `--resume` reads its
    /// data from the beginning, since the batches so far were the program's.
    ///
    /// # Errors
    /// [`Failure::Checkpoint`] or [`Failure::File`]; checkpoints of other steps are whole then.
    pub fn save_checkpoint(&mut self, run: impl AsRef<Path>) -> Result<PathBuf> {
        let run = run.as_ref();
        self.enter()?;
        create_dir_all(run).map_err(Failure::file(run))?;
        let session = self.session.awake_mut()?;
        // An update may be pending.
        session.finish_step()?;
        let session = self.session.awake()?;
        let mut files = model_files(session, &self.origin, self.base.as_ref(), &self.config);
        files.push(("config.toml".into(), self.config.to_toml()?.into_bytes()));
        let state = session.state();
        let contents = Contents {
            state: &self.trainer_state(session),
            model: &state.weights(),
            stem: state.stem(),
            optimizer: &state.optimizer(),
            files: &files,
            max_shard_bytes: MAX_SHARD_BYTES,
        };
        let folder = save(&Disk, run, &contents)?;
        self.saved = std::path::absolute(&folder).ok();
        Ok(folder)
    }

    /// Goes on from a checkpoint, or the newest whole one of a run: as if this trainer had made its steps. Model, adapters and formats of
    /// states are this trainer's, and must fit those in the checkpoint; other settings may differ.
    ///
    /// # Errors
    /// [`Failure::Checkpoint`], [`Failure::Weights`] or [`Failure::OptimizerState`]. What was read before stays, so the weights may be mixed: load a
    /// whole one before the next step.
    pub fn load_checkpoint(&mut self, folder: impl AsRef<Path>) -> Result {
        let checkpoint = newest_checkpoint(folder.as_ref())?;
        self.enter()?;
        let session = self.session.awake_mut()?;
        if let Some(base) = &self.base {
            base.fits(&checkpoint.path, &session.model().architecture().parameters)?;
        }
        self.saved = None;
        let _place = session.memory().clone().enter(Phase::Load, Layer::Whole);
        restore(&checkpoint, session, &self.config, self.base.as_ref())?;
        self.made = Totals::after(Some(&checkpoint.state));
        self.saved = std::path::absolute(&checkpoint.path).ok();
        Ok(())
    }

    /// Sets the weights alone from a folder in Hugging Face layout; of a model with adapters, theirs from a folder of PEFT's. Optimizer states
    /// and counters stay.
    ///
    /// # Errors
    /// [`Failure::Weights`]. What was read before stays.
    pub fn load_weights(&mut self, folder: impl AsRef<Path>) -> Result {
        self.enter()?;
        let session = self.session.awake_mut()?;
        if let Some(base) = &self.base {
            base.fits(folder.as_ref(), &session.model().architecture().parameters)?;
        }
        self.saved = None;
        match self.base {
            Some(_) => session.incoming().import_adapter(folder.as_ref())?,
            None => drop(session.incoming().import(folder.as_ref())?),
        }
        Ok(())
    }

    /// Whether a folder is a checkpoint, or a run that may have some: what [`Trainer::load_checkpoint`] takes.
    pub fn is_checkpoint(folder: impl AsRef<Path>) -> bool {
        let folder = folder.as_ref();
        folder.join(STATE_FILE).exists() || folder.join("checkpoints").exists()
    }

    fn trainer_state(&self, session: &Session) -> TrainerState {
        let (made, optim) = (&self.made, &self.config.optim);
        let (step, updates) = session.progress();
        let kinds = self.kinds.taken;
        TrainerState {
            format_version: FORMAT_VERSION,
            trainer_version: env!("CARGO_PKG_VERSION").into(),
            name: self.name.clone(),
            step: step as u64,
            updates: updates as u64,
            skipped_in_a_row: made.skipped_in_a_row as u64,
            skipped: made.skipped as u64,
            position: Position::default(),
            data: String::new(),
            tokens: made.tokens,
            targets: made.targets,
            pending: false,
            best: None,
            optimizer: OptimizerForm {
                weights: self.plan.dtype.into(),
                state_dtype: optim.state_dtype.to_string(),
                master: optim.master.to_string(),
            },
            algorithms: self.plan.algorithms.clone(),
            attention_kernels: kinds.attention.map(KernelKind::name).map(Into::into),
            experts_kernels: kinds.experts.map(KernelKind::name).map(Into::into),
            reads_bytes: self.tokens.reads_bytes(),
            origin_dtype: self.origin_dtype.clone(),
            left_out: self.left_out.clone(),
            ranks: None,
        }
    }
}
