//! The configuration of a run: its keys, where their values come from, what is refused, and what a step is made of.
//!
//! Every key is a row of [`keys`], with its kind, default, explanation and flag. Defaults are overridden by a preset or
//! file, that by dedicated flags, and that by `--set`. Each layer is checked key by key ([`dotted`]) before the layers are
//! merged ([`load`]); what the merged configuration may not contain is in [`check`]. A configuration without open
//! questions becomes [`Settings`], which sessions and plans read.

pub mod check;
mod checkpoints;
mod choices;
mod cudnn;
mod defaults;
mod device;
pub mod dotted;
mod error;
mod head_chunk;
mod hints;
mod homes;
mod key;
pub mod keys;
pub mod kind;
pub mod load;
mod need;
pub mod preset;
mod ranks;
mod reference;
mod resolve;
mod resumed;
mod schema;
mod settings;
mod size;
#[cfg(test)]
mod tests;
mod unknown;
mod values;

pub use choices::{AttentionBackend, FloatType, Graphs, HostPlace, Release};
pub use cudnn::{cudnn_fits, cudnn_misfit, cudnn_shape};
pub use device::{Device, DeviceError};
pub use error::ConfigError;
pub use head_chunk::HeadChunk;
pub use homes::OptimizerPlace;
pub use key::{Argument, Flag, Key, KeyDefault, Mark};
pub use keys::{
    AttentionConfig, BatchConfig, CheckpointConfig, CollectivesConfig, DataConfig, EvalConfig,
    HardwareConfig, LogConfig, LrConfig, MemoryConfig, OffloadConfig, OptimConfig, RecomputeConfig,
    TrainConfig,
};
pub use ranks::Engine;
pub use reference::reference;
pub use resolve::{Given, Resolved, Resume, RunOptions, Task, resolve};
pub use schema::{Auto, AutoOr, Config, HEURISTIC};
pub use settings::{
    BetweenSteps, GRAPHS_FROM_ACCUM, Settings, StateFormats, WholeMatrices, auto_attention,
};
pub use size::{Size, SizeError};
