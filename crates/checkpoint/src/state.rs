//! `trainer_state.json`: where a run is, beside its tensors.

use data::Position;
use serde::{Deserialize, Serialize};

/// The version that is written where one process writes all.
pub const FORMAT_VERSION: u64 = 1;

/// The version that is written where several ranks write.
pub const FORMAT_VERSION_OF_RANKS: u64 = 2;

/// The latest version that is read.
pub(crate) const LATEST_VERSION: u64 = FORMAT_VERSION_OF_RANKS;

/// The file of a checkpoint that holds the state.
pub const STATE_FILE: &str = "trainer_state.json";

/// Where a run is: all that a resumed run needs beside tensors and settings to go on bit for bit.
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
    /// Steps done; the next is one more.
    pub step: u64,
    /// Updates done: steps without those that were skipped. Bias correction and stochastic rounding count these.
    pub updates: u64,
    /// Steps skipped since the last update, for want of finite gradients.
    pub skipped_in_a_row: u64,
    /// Steps skipped in all.
    pub skipped: u64,
    /// The next sample that a step takes; what was only prefetched is not counted.
    pub position: Position,
    /// What the samples are: a fingerprint of the data that the position is in.
    pub data: String,
    /// Tokens read so far.
    pub tokens: u64,
    /// How many of these were targets.
    pub targets: u64,
    /// An evaluation that is due after this step was broken off, and has to be made.
    pub pending: bool,
    /// The best evaluation so far.
    pub best: Option<Best>,
    /// The forms of weights and states in the tensor files.
    pub optimizer: OptimizerForm,
    /// Which algorithms matrix products took, on CUDA; none in checkpoints that were written before there was a choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<String>,
    /// The version of the cuDNN that computed attention, where it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cudnn_version: Option<String>,
    /// Each byte of a text is a token of the model; where there is a tokenizer, its files say what is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reads_bytes: bool,
    /// How many ranks trained, and wrote, if several did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<u64>,
}

/// The best evaluation of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// After which step.
    pub step: u64,
    /// Its loss; finite.
    pub loss: f32,
    /// A fingerprint of what it was made on.
    pub data: String,
}

/// How weights and states are kept, in the words of the settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptimizerForm {
    /// Weights: `f32` or `bf16`.
    pub weights: String,
    /// Moments: `f32`, `bf16` or `8bit`.
    pub state_dtype: String,
    /// Master weights: `f32`, `bf16-split` or `none`.
    pub master: String,
}
