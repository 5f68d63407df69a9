//! What families of models choose between.

use serde::{Deserialize, Serialize};

/// How the residual stream is normalised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// RMSNorm.
    #[default]
    Rms,
    /// LayerNorm.
    Layer,
}

/// Where a block's norms stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormPlacement {
    /// In front of attention and of the feed-forward layer.
    #[default]
    Before,
    /// Behind them: what they add to the residual stream is normalised (OLMo 2).
    After,
    /// In front of them and behind them (Gemma 2).
    Both,
}

/// Extent of the norms of queries and keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNormExtent {
    /// The columns of a head.
    #[default]
    Head,
    /// Those of all heads (OLMo 2).
    All,
}

/// The function between the feed-forward layer's products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationFunction {
    /// silu(gate) up.
    #[default]
    Swiglu,
    /// gelu(gate) up, with GELU by its tanh form (Gemma).
    GegluTanh,
    /// gate sigmoid(alpha gate) (up + 1), with gate and up clamped to a limit (gpt-oss).
    ClampedSwiglu,
    /// GELU by its tanh form, without a gate.
    GeluTanh,
}

/// How tokens get their position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PositionKind {
    /// Queries and keys are turned by the rotary embedding.
    #[default]
    Rotary,
    /// A learned vector is added to each token's.
    Learned,
}

impl NormKind {
    /// The names in settings.
    pub const NAMES: &'static [&'static str] = &["rms", "layer"];
}

impl NormPlacement {
    /// Whether norms stand in front of sublayers.
    pub fn is_in_front(self) -> bool {
        self != NormPlacement::After
    }

    /// Whether norms stand behind sublayers.
    pub fn is_behind(self) -> bool {
        self != NormPlacement::Before
    }

    /// The names in settings.
    pub const NAMES: &'static [&'static str] = &["before", "after", "both"];
}

impl QkNormExtent {
    /// The names in settings.
    pub const NAMES: &'static [&'static str] = &["head", "all"];
}

impl ActivationFunction {
    /// The names in settings.
    pub const NAMES: &'static [&'static str] =
        &["swiglu", "geglu_tanh", "clamped_swiglu", "gelu_tanh"];
}

impl PositionKind {
    /// The names in settings.
    pub const NAMES: &'static [&'static str] = &["rotary", "learned"];
}
