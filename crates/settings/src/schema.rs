//! The configuration as data: one struct a section.

use std::collections::BTreeMap;
use std::path::PathBuf;

use model::ModelConfig;
use serde::{Deserialize, Serialize};

use super::choices::{AttentionBackend, FloatType, Graphs, HostPlace, Release};
use super::device::Device;
use super::error::ConfigError;
use super::head_chunk::HeadChunk;
use super::homes::OptimizerPlace;
use super::ranks::Engine;
use super::size::Size;
use data::{Format, Inputs, Packing};
use memory::{Rank, Window};
use optim::{LrAdjust, MasterFormat, MomentFormat, OptimizerKind, ScheduleKind};
use units::{Reduce, Zero};

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

/// `[data]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Files or folders to train on; `None`: the built-in text.
    pub path: Option<Inputs>,
    /// How the file is read.
    pub format: Format,
    /// Tokens of another tokenizer than the model's are taken.
    pub any_tokenizer: bool,
    /// Samples are drawn in an order shuffled by `train.seed`.
    pub shuffle: bool,
    /// How documents become sequences.
    pub packing: Packing,
    /// Steps that are read ahead.
    pub prefetch: usize,
    /// Tokens in a sample.
    pub seq: usize,
}

/// `[batch]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Samples in a micro-batch.
    pub micro: usize,
    /// Micro-batches in an optimizer step.
    pub accum: usize,
}

/// `[train]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Optimizer steps of the whole run.
    pub steps: usize,
    /// Passes over the data, from which `steps` follows once the data is open; `None`: `steps` was asked for.
    pub epochs: Option<f64>,
    /// Seed of initialisation, shuffling, stochastic rounding and dropout.
    pub seed: u64,
    /// Where to compute; `None`: the command's default.
    pub device: Option<Device>,
    /// Data type of weights and activations; `None`: the device's default.
    pub dtype: Option<FloatType>,
    /// Worker threads of the CPU; `None`: one per core. Never changes results.
    pub threads: Option<usize>,
    /// Steps in a row that may be skipped because loss or gradients are not finite; one more ends the run.
    pub max_skipped: usize,
    /// Name patterns of parameters that are not trained.
    pub freeze: Vec<String>,
    /// Micro-batches as CUDA graphs. Never changes results.
    pub graphs: Graphs,
}

/// `[optim]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimConfig {
    /// Which optimizer.
    pub kind: OptimizerKind,
    /// Data type of the moments.
    pub state_dtype: MomentFormat,
    /// Master copy of bf16 weights.
    pub master: MasterFormat,
    /// Data type of the accumulated gradients.
    pub grad_dtype: FloatType,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Global norm to which gradients are clipped; infinite: no clipping.
    pub clip_norm: f64,
    /// Name patterns of tensors that keep f32 moments under 8-bit states.
    pub f32_states: Vec<String>,
    /// Muon: decay of the momentum.
    pub muon_momentum: f64,
    /// Muon: the direction is a step ahead of the momentum.
    pub nesterov: bool,
    /// Muon: iterations of Newton-Schulz.
    pub ns_steps: usize,
    /// Muon: coefficients of an iteration.
    pub ns_coefficients: [f64; 3],
    /// Muon: the least norm that a direction is divided by.
    pub ns_eps: f64,
    /// Muon: data type of the iteration.
    pub ns_dtype: FloatType,
    /// Muon: how the learning rate of a matrix follows from its shape.
    pub lr_adjust: LrAdjust,
    /// Muon: name patterns of the matrices that it updates; `None`: all matrices of the blocks.
    pub matrices: Option<Vec<String>>,
    /// Adafactor: the least root of a variance, and the least root mean square of weights that steps go by.
    pub adafactor_eps: (AutoOr, f64),
    /// Adafactor: variances move by t^this towards the squares of step t.
    pub beta2_decay: f64,
    /// Adafactor: updates whose root mean square is larger are scaled down to it.
    pub clip_threshold: f64,
    /// When a unit's gradient has served its purpose.
    pub release: Release,
}

/// A number, or `auto` for a default that the place where it is used has.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AutoOr {
    /// That default.
    Auto(Auto),
    /// This number.
    Number(f64),
}

/// The word `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Auto {
    /// The word.
    Auto,
}

impl AutoOr {
    /// The number, or the default.
    pub fn or(self, default: f64) -> f64 {
        match self {
            AutoOr::Auto(Auto::Auto) => default,
            AutoOr::Number(number) => number,
        }
    }
}

/// `[lr]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LrConfig {
    /// The learning rate after the warmup.
    pub peak: f64,
    /// That of the matrices that muon updates; `None`: the same.
    pub matrices: Option<f64>,
    /// How it moves after the warmup.
    pub schedule: ScheduleKind,
    /// Steps of the linear warmup.
    pub warmup_steps: usize,
    /// Steps of the decay; `None`: until the last step, for wsd the last tenth of the steps.
    pub decay_steps: Option<usize>,
    /// Learning rate after the decay, as a fraction of the peak.
    pub min_ratio: f64,
}

/// `[recompute]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecomputeConfig {
    /// What every layer recomputes, in the words of `--recompute`; `auto` until a policy is chosen.
    pub spec: String,
    /// Specs for ranges of layers.
    pub layers: BTreeMap<String, String>,
    /// Measured times that `auto` counts with.
    pub costs: Option<PathBuf>,
}

/// `[attention]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionConfig {
    /// The implementation.
    pub backend: AttentionBackend,
}

/// `[offload]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OffloadConfig {
    /// Where the optimizer's state lives.
    pub optimizer: OptimizerPlace,
    /// Where weights live.
    pub parameters: HostPlace,
    /// Units of offloaded weights that are on the device at a time.
    pub parameter_slots: usize,
    /// Where gradients live.
    pub gradients: HostPlace,
    /// Labels of activations that wait on the host for their backward pass: `none` or a comma list.
    pub activations: String,
    /// Share of the blocks whose optimizer state is offloaded, from 0 to 1.
    pub fraction: f64,
    /// When what an update needs and is offloaded is updated.
    pub window: Window,
    /// Chunks of an update that are on the device at a time.
    pub buffer_count: usize,
    /// Most MiB of a chunk.
    pub slab_mib: usize,
    /// Folder on a disk for the optimizer's states.
    pub path: Option<PathBuf>,
}

/// `[eval]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalConfig {
    /// Steps between two evaluations; `None`: there are none.
    pub every: Option<usize>,
    /// What is evaluated on; `None`: the validation part of `data.path`.
    pub path: Option<PathBuf>,
    /// Samples in a micro-batch; `None`: as many as in training.
    pub micro_batch: Option<usize>,
    /// The most samples that are taken; `None`: all.
    pub samples: Option<usize>,
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Steps between two checkpoints; `None`: only the last step is saved. 0: no step is, unless a signal ends the run.
    pub every: Option<usize>,
    /// How many are kept; `None`: all.
    pub keep_last: Option<usize>,
    /// The one with the lowest loss in evaluation is kept too.
    pub keep_best: bool,
    /// Training waits for them, and no copy of the state is made.
    pub blocking: bool,
}

/// `[memory]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryConfig {
    /// Leases beyond it are refused.
    pub limit: Option<Size>,
    /// What the peak may be under an automatic choice.
    pub budget: Option<Size>,
    /// A run whose plan does not fit is tried anyway.
    pub force: bool,
    /// Tokens in a chunk of the output head. It decides the order of sums, so the gradients' bits.
    pub head_chunk: HeadChunk,
    /// Tokens in a tile of the stages that need no other token; `None`: whole micro-batches. It decides the order of sums.
    pub tile_tokens: Option<usize>,
}

/// `[hardware]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HardwareConfig {
    /// Bandwidth from host to device, GB/s.
    pub h2d_gbps: Option<f64>,
    /// Bandwidth from device to host, GB/s.
    pub d2h_gbps: Option<f64>,
    /// Bandwidth of both ways at a time, added up, GB/s.
    pub both_ways_gbps: Option<f64>,
    /// Bandwidth of the disk of offloaded states, each way, GB/s.
    pub disk_gbps: Option<f64>,
    /// Bandwidth of a rank's link to the others, each way, GB/s.
    pub link_gbps: Option<f64>,
    /// Bandwidth of the device's memory, GB/s.
    pub memory_gbps: Option<f64>,
    /// Peak rate of matrix products, TFLOP/s.
    pub peak_tflops: Option<f64>,
    /// The file of algorithms that matrix products take, or [`HEURISTIC`]; `None`: the file that is kept for the GPU, if there is
    /// one.
    pub algorithms: Option<PathBuf>,
}

/// What [`HardwareConfig::algorithms`] says for the library's first choice.
pub const HEURISTIC: &str = "heuristic";

/// `[collectives]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectivesConfig {
    /// What moves bytes between ranks.
    pub engine: Engine,
    /// What ranks divide; `None`: optimizer states, where there are ranks.
    pub zero: Option<Zero>,
    /// Most bytes that a reduction receives at a time, over all ranks.
    pub bucket_size: Size,
    /// When gradients are added up over ranks.
    pub reduce: Reduce,
    /// Gradients are exchanged while the backward pass goes on.
    pub overlap_grad_reduce: bool,
    /// Weights are gathered ahead of their use.
    pub overlap_param_gather: bool,
    /// Gathered weights go after the forward pass, and are gathered again.
    pub reshard_after_forward: bool,
    /// Seconds after which other ranks that do not answer are given up.
    pub timeout_s: u64,
}

/// `[log]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogConfig {
    /// Steps between two lines of progress.
    pub every: usize,
    /// Event files for TensorBoard are written.
    pub tensorboard: bool,
    /// Steps between two samples of the model's text; `None`: there are none.
    pub sample_every: Option<usize>,
    /// What a sample begins with.
    pub sample_prompt: String,
    /// Tokens of a sample, at most.
    pub sample_tokens: usize,
    /// Every lease is recorded.
    pub trace: bool,
    /// Phases and layers are shown to NVIDIA's profilers.
    pub nvtx: bool,
}

/// What asks for an automatic choice, of [`RecomputeConfig::spec`], of [`OffloadConfig::activations`] and of
/// [`MemoryConfig::head_chunk`].
pub(crate) const AUTO: &str = "auto";

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
