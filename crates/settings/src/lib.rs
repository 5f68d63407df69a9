//! The configuration of a run: its keys, the sources of their values, what is refused, and the settings of a step.
//!
//! Every key is a row of [`keys`], with its kind, default, explanation and flag. A preset or file overrides defaults,
//! flags override those, and `--set` overrides everything. Each layer is checked key by key ([`dotted`]) before the
//! layers are merged ([`load`]). [`check`] refuses invalid combinations in the merged configuration ([`Resolved`]), and in one
//! with a folder's model ([`Completed`]). Once everything is decided, it becomes [`Settings`], which sessions and plans read.

mod attention;
mod by_key;
pub mod check;
mod checkpoints;
mod choices;
mod completed;
mod defaults;
mod device;
pub mod dotted;
mod dpo;
mod error;
mod expert_unit;
mod fp8;
mod hints;
mod homes;
mod kernel_choice;
mod key;
pub mod keys;
pub mod kind;
pub mod load;
mod lora;
mod need;
mod pipeline;
mod policy;
pub mod preset;
mod ranks;
mod reference;
mod resolve;
mod resumed;
mod schedule;
mod schema;
mod settings;
mod settings_of_stage;
mod sharing;
mod size;
mod stage_tasks;
mod tasks_on_paper;
#[cfg(test)]
mod tests;
mod unknown;

pub use attention::{auto_attention, check_shared_memory};
pub use choices::{
    AttentionBackend, AutoOr, BaseType, DpoLoss, FloatType, Fp8Gradients, Fp8Recipe, Fp8Weights,
    Graphs, HostPlace, KernelChoice, Objective, OptimizerPlace, RankEngine, Release,
};
pub use completed::{Completed, FolderModel};
pub use device::{Device, DeviceError};
pub use error::{ConfigError, Result};
pub use kernel_choice::{KernelFamily, PerFamily, check_kernels, latest_kind};
pub use key::{Flag, FlagArgument, Key, KeyDefault, Mark};
pub use keys::{
    AttentionConfig, BatchConfig, CheckpointConfig, CollectivesConfig, DataConfig, DpoConfig,
    EvalConfig, ExpertProductsConfig, Fp8Config, HardwareConfig, LogConfig, LoraConfig, LrConfig,
    MemoryConfig, OffloadConfig, OptimConfig, ParallelConfig, RecomputeConfig, TrainConfig,
};
pub use lora::BaseStorage;
pub use pipeline::Pipeline;
pub use reference::reference;
pub use resolve::{Given, Resolved, Resume, RunOptions, Task, resolve};
pub use schedule::{PipelineOrder, PipelineSchedule};
pub use schema::{Config, HEURISTIC};
pub use settings::{
    BetweenSteps, DEFAULT_HEAD_CHUNK, GRAPHS_FROM_ACCUM, SampledText, Settings, StateFormats,
    StepObjective, WholeMatrices,
};
pub use size::{Size, SizeError};
pub use stage_tasks::{
    Carried, Handover, OrderedTask, PassKind, StageSchedule, StageTask, TaskKind,
};
