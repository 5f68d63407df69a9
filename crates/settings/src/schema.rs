//! The configuration as data. The struct of each section is generated from the rows of its keys.

use crate::Result;
use model::ModelConfig;
use serde::{Deserialize, Serialize};

use super::choices::{AUTO, FloatType};
use super::device::Device;
use super::keys::{
    AttentionConfig, BatchConfig, CheckpointConfig, CollectivesConfig, DataConfig, DpoConfig,
    EvalConfig, ExpertProductsConfig, Fp8Config, HardwareConfig, LogConfig, LoraConfig, LrConfig,
    MemoryConfig, OffloadConfig, OptimConfig, ParallelConfig, RecomputeConfig, TrainConfig,
};
use memory::Rank;

/// Everything that decides what a run computes. `configs/reference.toml` explains every key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The shape of the model.
    pub model: ModelConfig,
    /// The data that it is trained on.
    pub data: DataConfig,
    /// How a step's samples are divided.
    pub batch: BatchConfig,
    /// Length, seed, device and data type of the run.
    pub train: TrainConfig,
    /// The optimizer.
    pub optim: OptimConfig,
    /// The learning rate.
    pub lr: LrConfig,
    /// Products in eight bits.
    #[serde(default)]
    pub fp8: Fp8Config,
    /// Adapters.
    #[serde(default)]
    pub lora: LoraConfig,
    /// Preferences.
    #[serde(default)]
    pub dpo: DpoConfig,
    /// Which activations are recomputed.
    pub recompute: RecomputeConfig,
    /// The implementation of attention.
    pub attention: AttentionConfig,
    /// The implementation of products of experts.
    pub experts: ExpertProductsConfig,
    /// What does not live on the device.
    pub offload: OffloadConfig,
    /// Evaluations during training.
    #[serde(default)]
    pub eval: EvalConfig,
    /// When the state of a run is saved.
    pub checkpoint: CheckpointConfig,
    /// Limits of device memory.
    pub memory: MemoryConfig,
    /// What is known about the machine.
    #[serde(default)]
    pub hardware: HardwareConfig,
    /// How ranks train together.
    pub collectives: CollectivesConfig,
    /// How ranks share sequences.
    #[serde(default)]
    pub parallel: ParallelConfig,
    /// What is shown and recorded.
    pub log: LogConfig,
    /// This process's rank; `None` for a process without ranks. It is not in files, but comes from a launcher, or from
    /// whoever plans for a rank.
    #[serde(skip)]
    pub rank: Option<Rank>,
    /// GPU memory that the engine between ranks holds, once it was measured.
    #[serde(skip)]
    pub engine_bytes: Option<u64>,
}

/// The value of [`HardwareConfig::algorithms`] for the library's first choice.
pub const HEURISTIC: &str = "heuristic";

impl Config {
    /// Whether recompute is still to be chosen.
    pub fn chooses(&self) -> bool {
        self.recompute.spec.trim() == AUTO
    }

    /// Whether that choice may offload activations.
    pub fn chooses_offload(&self) -> bool {
        self.offload.activations.trim() == AUTO
    }

    /// Removes the work between steps, pictures of one, and a length in epochs: the caller decides the number of steps.
    pub fn without_between_steps(&mut self) {
        let none = Config::default();
        self.eval = none.eval;
        self.checkpoint = CheckpointConfig {
            every: Some(CheckpointConfig::NEVER),
            ..none.checkpoint
        };
        self.train.epochs = None;
        self.log.sample_every = None;
        (self.log.tensorboard, self.log.trace) = (false, false);
    }

    /// The device; the CPU if none is set.
    pub fn device(&self) -> Device {
        self.train.device.unwrap_or(Device::Cpu)
    }

    /// The type of weights and activations; the device's default if none is set.
    pub fn dtype(&self) -> FloatType {
        let default = match self.device() {
            Device::Cpu => FloatType::F32,
            Device::Cuda { .. } => FloatType::Bf16,
        };
        self.train.dtype.unwrap_or(default)
    }

    /// The configuration as TOML, with every key that has a value. Loading it gives an equal one.
    ///
    /// # Errors
    /// If a value cannot be written in TOML, such as a path that is not Unicode.
    pub fn to_toml(&self) -> Result<String> {
        Ok(toml::to_string(self)?)
    }
}
