//! Saves a checkpoint of several ranks, each of which writes its own elements, beside its steps or while it waits.
//!
//! The first rank makes the folder, and every rank writes its file into it. Once all of these are durable, the first
//! rank writes the common files, and gives the folder its name. If a rank fails, nothing is published. All ranks must
//! make the same calls.

use crate::Result;
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
    writer: BackgroundWriter<SavedPart>,
    /// The result of a part that was written without the writer.
    made: Option<SavedPart>,
    under_way: Option<UnderWay>,
}

/// A rank's result: its part, or `None` after the common files were written.
type SavedPart = Result<Option<WrittenPieces>>;

/// A save under way.
struct UnderWay {
    staging: StagedCheckpoint,
    /// `None` once all parts are written, while the first rank completes the checkpoint.
    parted: Option<JointCheckpoint>,
}

/// The place for a rank's part.
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
    pub fn write(&self, pieces: &dyn PieceSource) -> Result<WrittenPieces> {
        write_part(&*self.disk, &self.staging, self.member, pieces)
    }
}

impl JointSaver {
    /// A saver without a save under way.
    pub fn new(group: Arc<dyn Group>, disk: Arc<dyn FileSystem>) -> JointSaver {
        JointSaver {
            group,
            disk,
            writer: BackgroundWriter::new(),
            made: None,
            under_way: None,
        }
    }

    /// Whether this rank writes the common files.
    pub fn leads(&self) -> bool {
        self.group.rank() == 0
    }

    /// Starts a save, with `write` in the background. No other save may be under way.
    ///
    /// # Errors
    /// On all ranks, if the first rank cannot make the folder. Then no save is under way.
    pub fn begin(
        &mut self,
        checkpoint: JointCheckpoint,
        write: impl FnOnce(&RankPart) -> Result<WrittenPieces> + Send + 'static,
    ) -> Result {
        let part = self.stage(checkpoint)?;
        self.start(move || write(&part).map(Some));
        Ok(())
    }

    /// Saves and waits, and returns the path. No other save may be under way.
    ///
    /// # Errors
    /// On all ranks, this rank's failure, else [`CheckpointError::OtherRank`]; then nothing is published.
    /// [`CheckpointError::Group`] if ranks are lost.
    pub fn save(
        &mut self,
        checkpoint: JointCheckpoint,
        pieces: &dyn PieceSource,
    ) -> Result<PathBuf> {
        let part = self.stage(checkpoint)?;
        self.made = Some(part.write(pieces).map(Some));
        self.wait().expect("a save is under way")
    }

    /// The outcome of the save under way, if it has ended; errors as for [`JointSaver::save`]. Waits for no disk.
    pub fn poll(&mut self) -> Option<Result<PathBuf>> {
        self.under_way.as_ref()?;
        match gather(&*self.group, Ok(self.writer.is_busy())) {
            Err(error) => Some(Err(error)),
            Ok(busy) if busy.contains(&true) => None,
            Ok(_) => self.advance(),
        }
    }

    /// Waits for the save under way, if any, and returns its outcome, with the errors of [`JointSaver::save`].
    pub fn wait(&mut self) -> Option<Result<PathBuf>> {
        while self.under_way.is_some() {
            if let Some(outcome) = self.advance() {
                return Some(outcome);
            }
        }
        None
    }

    /// Waits until all ranks have done their current half, and starts the next. Returns the outcome after the last.
    fn advance(&mut self) -> Option<Result<PathBuf>> {
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

    /// Makes the folder on the first rank, and returns this rank's place in it. A save is then under way.
    fn stage(&mut self, checkpoint: JointCheckpoint) -> Result<RankPart> {
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

    fn start(&mut self, job: impl FnOnce() -> SavedPart + Send + 'static) {
        if let Err(error) = self.writer.start(job) {
            self.made = Some(Err(CheckpointError::Thread(error)));
        }
    }
}
