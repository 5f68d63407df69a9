//! Checkpoints of a training run: saved so that a power cut leaves a whole one, read only if whole.
//!
//! [`save`] writes `RUN/checkpoints/step-N/` through a [`files::FileSystem`]: into a temporary folder, every file made
//! durable, a manifest with sizes and checksums last, then the folder gets its name. [`Checkpoint::open`] believes nothing
//! that the manifest does not confirm, and [`find`] takes the newest whole checkpoint of a run. [`keep`] removes old ones.
//! Several ranks save and find together ([`JointSaver`], [`find_together`]): all of them, or none.
//! [`BackgroundWriter`] does such work beside training, and [`RunLock`] keeps a second run out of the folder. The format is
//! `docs/reference/checkpoint.md`.
//!
//! This crate knows tensors by name alone: no model, no device, no settings.

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
pub use error::{CheckpointError, Damage};
pub use find::{Found, find, find_any_together, find_together, glance};
pub use joint::{JointSaver, RankPart};
pub use keep::{keep, saved, set_aside_after};
pub use lock::{LockError, RunLock};
pub use manifest::{Manifest, ManifestFile};
pub use open::Checkpoint;
pub use ranks::JointCheckpoint;
pub use save::{Contents, save};
pub use state::{
    Best, FORMAT_VERSION, FORMAT_VERSION_OF_RANKS, OptimizerForm, STATE_FILE, TrainerState,
};
