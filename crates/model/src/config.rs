//! The shape of a model: what `[model]` in a configuration and `config.json` in a Hugging Face folder both say.

use serde::{Deserialize, Serialize};

/// The shape of a decoder-only transformer of the Llama family (Llama, Qwen2, Qwen3).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of transformer blocks.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads; divides `heads` (grouped-query attention).
    pub kv_heads: usize,
    /// Width of one head; `heads * head_dim` need not equal `hidden`.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Number of tokens known to the embedding and the output head.
    pub vocab: usize,
    /// The output head reuses the embedding matrix.
    #[serde(default)]
    pub tie_embeddings: bool,
    /// q, k and v projections have a bias (Qwen2).
    #[serde(default)]
    pub qkv_bias: bool,
    /// q and k are normalised per head before the rotary embedding (Qwen3).
    #[serde(default)]
    pub qk_norm: bool,
    /// Added to the mean square inside every RMSNorm.
    #[serde(default = "default_norm_eps")]
    pub norm_eps: f64,
    /// Base of the rotary embedding's wavelengths.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Llama-3's stretching of long rotary wavelengths; absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Standard deviation of freshly initialised matrices.
    #[serde(default = "default_init_std")]
    pub init_std: f64,
}

/// Llama-3's rotary scaling: wavelengths longer than `original_max_position / low_freq_factor` are stretched by
/// `factor`, those shorter than `original_max_position / high_freq_factor` kept, those between blended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeScaling {
    /// How far long wavelengths are stretched.
    pub factor: f64,
    /// Upper end of the stretched wavelengths.
    pub low_freq_factor: f64,
    /// Lower end of the blended wavelengths.
    pub high_freq_factor: f64,
    /// Context length of the original training.
    pub original_max_position: usize,
}

fn default_norm_eps() -> f64 {
    1e-5
}

fn default_rope_theta() -> f64 {
    10_000.0
}

fn default_init_std() -> f64 {
    0.02
}

/// What is wrong with a model's shape.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ConfigError {
    /// A size is zero.
    #[error("model.{0} is 0; every size of a model is at least 1")]
    Zero(&'static str),
    /// Query heads do not divide into groups.
    #[error(
        "model.heads = {heads} is not a multiple of model.kv_heads = {kv_heads}; each key-value head serves the same number of query heads"
    )]
    HeadGroups {
        /// Query heads.
        heads: usize,
        /// Key-value heads.
        kv_heads: usize,
    },
    /// The rotary embedding pairs the two halves of a head.
    #[error(
        "model.head_dim = {0} is odd; the rotary embedding pairs its two halves, choose an even width"
    )]
    OddHeadDim(usize),
    /// A real number is out of its range.
    #[error("model.{name} = {value}; it must be a finite number above 0")]
    NotPositive {
        /// Key.
        name: &'static str,
        /// Its value.
        value: f64,
    },
}

impl ModelConfig {
    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// The first key that is wrong, with what it should be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("vocab", self.vocab),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(ConfigError::Zero(name));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(ConfigError::HeadGroups {
                heads: self.heads,
                kv_heads: self.kv_heads,
            });
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(ConfigError::OddHeadDim(self.head_dim));
        }
        let reals = [
            ("norm_eps", self.norm_eps),
            ("rope_theta", self.rope_theta),
            ("init_std", self.init_std),
        ];
        let scaling = self.rope_scaling.iter().flat_map(|scaling| {
            [
                ("rope_scaling.factor", scaling.factor),
                ("rope_scaling.low_freq_factor", scaling.low_freq_factor),
                (
                    "rope_scaling.high_freq_factor - low_freq_factor",
                    scaling.high_freq_factor - scaling.low_freq_factor,
                ),
                (
                    "rope_scaling.original_max_position",
                    scaling.original_max_position as f64,
                ),
            ]
        });
        match reals
            .into_iter()
            .chain(scaling)
            .find(|(_, value)| !(value.is_finite() && *value > 0.0))
        {
            Some((name, value)) => Err(ConfigError::NotPositive { name, value }),
            None => Ok(()),
        }
    }
}
