//! `trainer_state.json`: the state of a run besides its tensors.

use data::Position;
use serde::{Deserialize, Serialize};

/// The version that is written if one process writes everything.
pub const FORMAT_VERSION: u64 = 1;

/// The version that is written if several ranks write.
pub const FORMAT_VERSION_OF_RANKS: u64 = 2;

/// The latest version that is read.
pub(crate) const LATEST_VERSION: u64 = FORMAT_VERSION_OF_RANKS;

/// The file of a checkpoint with the state.
pub const STATE_FILE: &str = "trainer_state.json";

/// All that a run needs besides tensors and settings to be resumed bit for bit.
///
/// Everything else that is random or scheduled follows from the seed in the settings and from these counters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// [`FORMAT_VERSION`], or [`FORMAT_VERSION_OF_RANKS`].
    pub format_version: u64,
    /// The version of the program that wrote it, for people.
    pub trainer_version: String,
    /// The name of the configuration that the run began with, for people.
    pub name: String,
    /// Steps made. The next step has the next number.
    pub step: u64,
    /// Updates made: steps without skipped ones. Bias correction and stochastic rounding use this count.
    pub updates: u64,
    /// Steps skipped since the last update, because gradients were not finite.
    pub skipped_in_a_row: u64,
    /// All skipped steps.
    pub skipped: u64,
    /// The next sample of a step. Samples that were only prefetched do not count.
    pub position: Position,
    /// A fingerprint of the data that the position belongs to.
    pub data: String,
    /// Tokens read so far.
    pub tokens: u64,
    /// How many of these were targets.
    pub targets: u64,
    /// Whether an evaluation after this step was interrupted, and is still to be made.
    pub pending: bool,
    /// The best evaluation so far.
    pub best: Option<Best>,
    /// The formats of weights and states in the tensor files.
    pub optimizer: OptimizerForm,
    /// The algorithms of matrix products, on CUDA; none in checkpoints from before there was a choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<String>,
    /// The kind of kernels that computed attention, on CUDA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_kernels: Option<String>,
    /// The kind of kernels that computed products of experts, on CUDA; none without experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts_kernels: Option<String>,
    /// Whether each byte of a text is a token. If there is a tokenizer, its files define the tokens.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reads_bytes: bool,
    /// The type of the weights in the folder that the run started from, which `trainer export` keeps, if it is narrower than
    /// here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin_dtype: Option<String>,
    /// Weights beside the model in the folder that the run started from, which `trainer export` copies from there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_out: Option<LeftOutWeights>,
    /// The number of ranks that trained and wrote, if there were several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<u64>,
}

/// Weights of a folder that are no part of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LeftOutWeights {
    /// The folder.
    pub folder: String,
    /// The beginnings of their names.
    pub beginnings: Vec<String>,
    /// Their bytes.
    pub bytes: u64,
}

/// The best evaluation of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The step after which it was made.
    pub step: u64,
    /// Its loss; finite.
    pub loss: f32,
    /// A fingerprint of the data that it was made on.
    pub data: String,
}

/// The formats of weights and states, in the words of the settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptimizerForm {
    /// Weights: `f32` or `bf16`.
    pub weights: String,
    /// Moments: `f32`, `bf16` or `8bit`.
    pub state_dtype: String,
    /// Master weights: `f32`, `bf16-split`, `bf16+8` or `none`.
    pub master: String,
}
