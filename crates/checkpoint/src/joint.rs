//! A checkpoint that several ranks save, each the elements that it has, beside their steps or while these wait.
//!
//! The first rank makes the folder, then every rank writes its file into it; when all of them are durable, the first one writes
//! what belongs to them all, and gives the folder its name. Where a rank fails, nothing is published. Every rank makes the same
//! calls.

use crate::agree::{agree, gather};
use crate::background::BackgroundWriter;
use crate::error::CheckpointError;
use crate::ranks::{JointCheckpoint, StagedCheckpoint, discard_staged, publish, stage, write_part};
use collectives::Group;
use files::{FileSystem, PieceSource, WrittenPieces};
use std::path::PathBuf;
use std::sync::Arc;

/// Saves checkpoints of a group of ranks, one at a time.
pub struct JointSaver {
    group: Arc<dyn Group>,
    disk: Arc<dyn FileSystem>,
    writer: BackgroundWriter<Made>,
    /// What was made without the writer.
    made: Option<Made>,
    under_way: Option<UnderWay>,
}

/// What a rank made of its part, or of the whole: then there is nothing to tell but that it is done.
type Made = Result<Option<WrittenPieces>, CheckpointError>;

/// A checkpoint that is being saved.
struct UnderWay {
    staging: StagedCheckpoint,
    /// None: all parts are written, and the first rank makes a checkpoint of them.
    parted: Option<JointCheckpoint>,
}

/// Where a rank writes its part.
pub struct RankPart {
    disk: Arc<dyn FileSystem>,
    staging: StagedCheckpoint,
    member: (usize, usize),
}

impl RankPart {
    /// Writes the part, and makes it durable.
    ///
    /// # Errors
    /// [`CheckpointError::Files`].
    pub fn write(&self, pieces: &dyn PieceSource) -> Result<WrittenPieces, CheckpointError> {
        write_part(&*self.disk, &self.staging, self.member, pieces)
    }
}

impl JointSaver {
    /// One that has nothing to do.
    pub fn new(group: Arc<dyn Group>, disk: Arc<dyn FileSystem>) -> JointSaver {
        JointSaver {
            group,
            disk,
            writer: BackgroundWriter::new(),
            made: None,
            under_way: None,
        }
    }

    /// Whether this is the rank that tells.
    pub fn leads(&self) -> bool {
        self.group.rank() == 0
    }

    /// Begins to save, with `write` in the background. No other save is under way.
    ///
    /// # Errors
    /// On all ranks, if the first one cannot make the folder: nothing is under way then.
    pub fn begin(
        &mut self,
        checkpoint: JointCheckpoint,
        write: impl FnOnce(&RankPart) -> Result<WrittenPieces, CheckpointError> + Send + 'static,
    ) -> Result<(), CheckpointError> {
        let part = self.stage(checkpoint)?;
        self.start(move || write(&part).map(Some));
        Ok(())
    }

    /// Saves at once, and returns where. No other save is under way.
    ///
    /// # Errors
    /// On all ranks, why this one failed, else [`CheckpointError::OtherRank`]: nothing is published then.
    /// [`CheckpointError::Group`] if ranks are lost.
    pub fn save(
        &mut self,
        checkpoint: JointCheckpoint,
        pieces: &dyn PieceSource,
    ) -> Result<PathBuf, CheckpointError> {
        let part = self.stage(checkpoint)?;
        self.made = Some(part.write(pieces).map(Some));
        self.wait().expect("a save is under way")
    }

    /// How the save ended that was under way, if it has; the errors are those of [`JointSaver::save`]. Waits for no disk.
    pub fn poll(&mut self) -> Option<Result<PathBuf, CheckpointError>> {
        self.under_way.as_ref()?;
        match gather(&*self.group, Ok(self.writer.is_busy())) {
            Err(error) => Some(Err(error)),
            Ok(busy) if busy.contains(&true) => None,
            Ok(_) => self.advance(),
        }
    }

    /// Waits for the save that is under way, if one is; the errors are those of [`JointSaver::save`].
    pub fn wait(&mut self) -> Option<Result<PathBuf, CheckpointError>> {
        while self.under_way.is_some() {
            if let Some(outcome) = self.advance() {
                return Some(outcome);
            }
        }
        None
    }

    /// Waits until all ranks are done with what they do, and goes on from there; says how the save ended, if it has.
    fn advance(&mut self) -> Option<Result<PathBuf, CheckpointError>> {
        let UnderWay { staging, parted } = self.under_way.take()?;
        let made = self.made.take().or_else(|| self.writer.wait());
        let made = made.expect("every rank makes something of each half of a save");
        let Some(checkpoint) = parted else {
            return Some(agree(&*self.group, made).map(|_| staging.saved()));
        };
        let parts: Vec<WrittenPieces> = match gather(&*self.group, made) {
            Ok(parts) => parts.into_iter().flatten().collect(),
            Err(error) => {
                if self.leads() {
                    discard_staged(&*self.disk, &staging);
                }
                return Some(Err(error));
            }
        };
        let (disk, staged) = (self.disk.clone(), staging.clone());
        match self.leads() {
            true => self.start(move || {
                publish(&*disk, &staged, &checkpoint, &parts)?;
                (checkpoint.published)();
                Ok(None)
            }),
            false => self.made = Some(Ok(None)),
        }
        self.under_way = Some(UnderWay {
            staging,
            parted: None,
        });
        None
    }

    /// Makes the folder for the parts, on the first rank, and tells where this rank's goes. From then on a save is under way.
    fn stage(&mut self, checkpoint: JointCheckpoint) -> Result<RankPart, CheckpointError> {
        let staging = StagedCheckpoint {
            run: checkpoint.run.clone(),
            step: checkpoint.state.step,
        };
        let staged = match self.leads() {
            true => stage(&*self.disk, &staging),
            false => Ok(()),
        };
        agree(&*self.group, staged)?;
        self.under_way = Some(UnderWay {
            staging: staging.clone(),
            parted: Some(checkpoint),
        });
        Ok(RankPart {
            disk: self.disk.clone(),
            staging,
            member: (self.group.rank(), self.group.size()),
        })
    }

    fn start(&mut self, job: impl FnOnce() -> Made + Send + 'static) {
        if let Err(error) = self.writer.start(job) {
            self.made = Some(Err(CheckpointError::Thread(error)));
        }
    }
}
