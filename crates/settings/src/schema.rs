//! The configuration as data. The struct of each section is made of the rows of its keys.

use model::ModelConfig;
use serde::{Deserialize, Serialize};

use super::choices::{AUTO, FloatType};
use super::device::Device;
use super::error::ConfigError;
use super::keys::{
    AttentionConfig, BatchConfig, CheckpointConfig, CollectivesConfig, DataConfig, EvalConfig,
    HardwareConfig, LogConfig, LrConfig, MemoryConfig, OffloadConfig, OptimConfig, RecomputeConfig,
    TrainConfig,
};
use memory::Rank;

/// Everything that decides what a run computes. `configs/reference.toml` explains every key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The shape of the model.
    pub model: ModelConfig,
    /// What it is trained on.
    pub data: DataConfig,
    /// How a step's samples are divided.
    pub batch: BatchConfig,
    /// Length, seed, device and data type of the run.
    pub train: TrainConfig,
    /// The optimizer.
    pub optim: OptimConfig,
    /// The learning rate.
    pub lr: LrConfig,
    /// Which activations are computed again.
    pub recompute: RecomputeConfig,
    /// The implementation of attention.
    pub attention: AttentionConfig,
    /// What lives elsewhere than on the device.
    pub offload: OffloadConfig,
    /// What is measured on other data while training.
    #[serde(default)]
    pub eval: EvalConfig,
    /// When the state of a run is saved.
    pub checkpoint: CheckpointConfig,
    /// Limits of device memory.
    pub memory: MemoryConfig,
    /// What is known about the machine.
    #[serde(default)]
    pub hardware: HardwareConfig,
    /// How ranks that train together do so.
    pub collectives: CollectivesConfig,
    /// What is shown and recorded.
    pub log: LogConfig,
    /// Which rank this is the configuration of; `None`: there is one process alone. No file says it: a launcher does, or
    /// whoever plans for one.
    #[serde(skip)]
    pub rank: Option<Rank>,
    /// What the engine between ranks holds of each GPU's memory, once it was measured.
    #[serde(skip)]
    pub engine_bytes: Option<u64>,
}

/// What [`HardwareConfig::algorithms`] says for the library's first choice.
pub const HEURISTIC: &str = "heuristic";

impl Config {
    /// Whether what to recompute is still to be chosen.
    pub fn chooses(&self) -> bool {
        self.recompute.spec.trim() == AUTO
    }

    /// Whether such a choice may offload activations.
    pub fn chooses_offload(&self) -> bool {
        self.offload.activations.trim() == AUTO
    }

    /// Leaves out what a run does between its steps, and a length in epochs: the caller says how many steps there are.
    pub fn without_between_steps(&mut self) {
        let none = Config::default();
        self.eval = none.eval;
        self.checkpoint = CheckpointConfig {
            every: Some(CheckpointConfig::NEVER),
            ..none.checkpoint
        };
        self.train.epochs = None;
        self.log.sample_every = None;
        self.log.tensorboard = false;
    }

    /// Where to compute; the processor where that is open.
    pub fn device(&self) -> Device {
        self.train.device.unwrap_or(Device::Cpu)
    }

    /// The type of weights and activations; where that is open, the device's.
    pub fn dtype(&self) -> FloatType {
        let default = match self.device() {
            Device::Cpu => FloatType::F32,
            Device::Cuda { .. } => FloatType::Bf16,
        };
        self.train.dtype.unwrap_or(default)
    }

    /// The configuration as TOML, every key that has a value; loading it gives an equal one.
    ///
    /// # Errors
    /// A value that TOML cannot express, such as a path that is not Unicode.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        Ok(toml::to_string(self)?)
    }
}
