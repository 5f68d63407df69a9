//! The configuration of a run: its keys, where their values come from, and what is refused.
//!
//! Defaults are overridden by a preset or file, that by dedicated flags, and that by `--set`. Each
//! layer is checked key by key ([`keys`]) before the layers are merged ([`load`]); what the merged
//! configuration may not contain is in [`check`].

pub mod args;
pub mod check;
mod choices;
mod defaults;
mod device;
mod error;
pub mod keys;
pub mod kind;
pub mod load;
pub mod preset;
pub mod resolve;
mod schema;
mod size;
#[cfg(test)]
mod tests;
mod unknown;

pub use choices::{
    AttentionBackend, DataFormat, Dtype, GradDtype, Master, OffloadWindow, OptimizerPlace,
    Schedule, StateDtype,
};
pub use device::{Device, DeviceError};
pub use error::ConfigError;
pub use resolve::{Action, Resolved, RunOptions};
pub use schema::{
    AttentionConfig, BatchConfig, Config, DataConfig, HardwareConfig, LogConfig, LrConfig,
    MemoryConfig, OffloadConfig, OptimConfig, RecomputeConfig, TrainConfig,
};
pub use size::{Size, SizeError};
