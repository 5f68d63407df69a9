//! A checkpoint that the ranks of a run save together, beside their steps: every rank makes the same calls.

use super::saving::Checkpointing;
use checkpoint::{
    BackgroundWriter, CheckpointError, agree, discard_staged, gather, stage, write_part,
};
use collectives::Group;
use files::{Disk, PieceSource, WrittenPieces};
use session::StateOnHost;
use std::path::PathBuf;
use std::sync::Arc;

/// What this rank does for a checkpoint.
pub(super) struct Together {
    group: Arc<dyn Group>,
    writer: BackgroundWriter<Made>,
    /// What was made without the writer.
    made: Option<Made>,
    under_way: Option<UnderWay>,
}

/// What a rank made of its part, or of the whole: then there is nothing to tell but that it is done.
type Made = Result<Option<WrittenPieces>, CheckpointError>;

/// How a save ended: on all ranks alike.
pub(super) type Outcome = Result<PathBuf, CheckpointError>;

/// A checkpoint that is being saved.
struct UnderWay {
    checkpointing: Arc<Checkpointing>,
    /// All parts are written, and the first rank makes a checkpoint of them.
    is_whole: bool,
}

impl Together {
    pub(super) fn new(group: Arc<dyn Group>) -> Together {
        Together {
            group,
            writer: BackgroundWriter::new(),
            made: None,
            under_way: None,
        }
    }

    /// Whether this is the rank that tells.
    pub(super) fn leads(&self) -> bool {
        self.group.rank() == 0
    }

    /// Begins to save a copy. No other save is under way.
    pub(super) fn begin(
        &mut self,
        checkpointing: Checkpointing,
        copy: StateOnHost,
    ) -> Result<(), CheckpointError> {
        self.stage(&checkpointing)?;
        let (staging, member) = (checkpointing.staging(), self.member());
        self.under_way = Some(UnderWay::new(checkpointing));
        self.start(move || write_part(&Disk, &staging, member, &copy.pieces()).map(Some));
        Ok(())
    }

    /// Saves while training waits. No other save is under way.
    pub(super) fn save(
        &mut self,
        checkpointing: Checkpointing,
        pieces: &dyn PieceSource,
    ) -> Outcome {
        self.stage(&checkpointing)?;
        let part = write_part(&Disk, &checkpointing.staging(), self.member(), pieces);
        self.made = Some(part.map(Some));
        self.under_way = Some(UnderWay::new(checkpointing));
        self.wait().expect("a save is under way")
    }

    /// How the save ended that was under way, if it has. Waits for no disk.
    pub(super) fn poll(&mut self) -> Option<Outcome> {
        self.under_way.as_ref()?;
        match gather(&*self.group, Ok(self.writer.is_busy())) {
            Err(error) => Some(Err(error)),
            Ok(busy) if busy.contains(&true) => None,
            Ok(_) => self.advance(),
        }
    }

    /// Waits for the save that is under way, if one is.
    pub(super) fn wait(&mut self) -> Option<Outcome> {
        while self.under_way.is_some() {
            if let Some(outcome) = self.advance() {
                return Some(outcome);
            }
        }
        None
    }

    /// Waits until all ranks are done with what they do, and goes on from there; says how the save ended, if it has.
    fn advance(&mut self) -> Option<Outcome> {
        let UnderWay {
            checkpointing,
            is_whole,
        } = self.under_way.take()?;
        let made = self.made.take().or_else(|| self.writer.wait());
        let made = made.expect("every rank makes something of each half of a save");
        if is_whole {
            return Some(agree(&*self.group, made).map(|_| checkpointing.staging().saved()));
        }
        let parts: Vec<WrittenPieces> = match gather(&*self.group, made) {
            Ok(parts) => parts.into_iter().flatten().collect(),
            Err(error) => {
                if self.leads() {
                    discard_staged(&Disk, &checkpointing.staging());
                }
                return Some(Err(error));
            }
        };
        let publishing = checkpointing.clone();
        match self.leads() {
            true => self.start(move || publishing.publish(&parts).map(|_| None)),
            false => self.made = Some(Ok(None)),
        }
        self.under_way = Some(UnderWay {
            checkpointing,
            is_whole: true,
        });
        None
    }

    /// Makes the folder for the parts, on the first rank.
    fn stage(&self, checkpointing: &Checkpointing) -> Result<(), CheckpointError> {
        let staged = match self.leads() {
            true => stage(&Disk, &checkpointing.staging()),
            false => Ok(()),
        };
        agree(&*self.group, staged)
    }

    fn start(&mut self, job: impl FnOnce() -> Made + Send + 'static) {
        if let Err(error) = self.writer.start(job) {
            self.made = Some(Err(CheckpointError::Thread(error)));
        }
    }

    fn member(&self) -> (usize, usize) {
        (self.group.rank(), self.group.size())
    }
}

impl UnderWay {
    fn new(checkpointing: Checkpointing) -> UnderWay {
        UnderWay {
            checkpointing: Arc::new(checkpointing),
            is_whole: false,
        }
    }
}
