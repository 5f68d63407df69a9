//! Checkpoints of a training run. After a power failure a whole one is left, and only whole ones are read.
//!
//! [`save`] writes `RUN/checkpoints/step-N/` through a [`files::FileSystem`]: it writes into a temporary folder, makes
//! every file durable, writes a manifest with sizes and checksums last, and then renames the folder.
//! [`Checkpoint::open`] checks everything against the manifest, and [`find`] opens the newest whole checkpoint of a
//! run. [`keep`] removes old ones. Several ranks save and find together ([`JointSaver`], [`find_together`]): either all
//! succeed, or none. [`BackgroundWriter`] runs such work beside training, and [`RunLock`] keeps a second run out of the
//! folder, [`ModelLock`] a second command that writes a model there. `docs/reference/checkpoint.md` describes the format.
//!
//! This crate knows tensors only by name, and has no model, no device and no settings.

mod agree;
mod background;
mod error;
mod find;
mod joint;
mod keep;
mod lock;
mod manifest;
mod names;
mod open;
mod ranks;
mod save;
mod state;

pub use background::BackgroundWriter;
pub use error::{CheckpointError, Damage, Result};
pub use find::{WholeCheckpoint, find, find_any_together, find_together, glance};
pub use joint::{JointSaver, RankPart};
pub use keep::{keep, saved, set_aside_after};
pub use lock::{LockError, MODEL_LOCK, ModelLock, RunLock};
pub use manifest::{Manifest, ManifestFile};
pub use open::Checkpoint;
pub use ranks::JointCheckpoint;
pub use save::{Contents, save};
pub use state::{
    Best, FORMAT_VERSION, FORMAT_VERSION_OF_RANKS, LeftOutWeights, OptimizerForm, STATE_FILE,
    TrainerState,
};
