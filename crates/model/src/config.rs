//! The shape of a model: what `[model]` in a configuration and `config.json` in a Hugging Face folder both say.

use serde::{Deserialize, Serialize};

/// The shape of a decoder-only transformer: of the Llama family (Llama, Mistral, Qwen2, Qwen3), or of GPT-2.
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
    /// How the residual stream is normalised.
    #[serde(default)]
    pub norm: NormKind,
    /// What the feed-forward layer has between its products.
    #[serde(default)]
    pub activation: ActivationFunction,
    /// How tokens know where they stand.
    #[serde(default)]
    pub positions: Positions,
    /// Rows of the table of learned positions: the longest sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_positions: Option<usize>,
    /// All projections have a bias.
    #[serde(default)]
    pub biases: bool,
    /// Rate at which attention probabilities, what is added to the residual stream, and the embedding are dropped in
    /// training.
    #[serde(default)]
    pub dropout: f64,
    /// Added to the mean square, or the variance, inside every norm.
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

/// What the feed-forward layer has between its products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationFunction {
    /// silu(gate) up.
    #[default]
    Swiglu,
    /// GELU by its tanh form, without a gate.
    GeluTanh,
}

/// How tokens know where they stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
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

impl ActivationFunction {
    /// The names in settings.
    pub const NAMES: &'static [&'static str] = &["swiglu", "gelu_tanh"];
}

impl Positions {
    /// The names in settings.
    pub const NAMES: &'static [&'static str] = &["rotary", "learned"];
}

/// Which stages a model's blocks are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// RMSNorm, rotary embedding, SwiGLU.
    Llama,
    /// LayerNorm, learned positions, GELU, biases.
    Gpt2,
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

/// Layers that a model may have.
const MOST_LAYERS: usize = 1 << 16;

/// Parameters that a model may have: their bytes in any arena can be counted.
const MOST_PARAMETERS: f64 = (1_u64 << 48) as f64;

/// What is wrong with a model's shape.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ConfigError {
    /// A size is zero.
    #[error("model.{0} is 0; every size of a model is at least 1")]
    Zero(&'static str),
    /// More layers than anyone trains, which would take a while to list.
    #[error("model.layers = {0}; it must be at most {MOST_LAYERS}")]
    TooManyLayers(usize),
    /// More parameters than can be counted in bytes.
    #[error(
        "the sizes of the model make {0:.1e} parameters, more than 2^48; look for one that is mistyped"
    )]
    TooManyParameters(f64),
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
    /// Features of different families.
    #[error(
        "model.{key} does not go with model.norm = \"{norm}\": {family} models have {expected}; this trainer has no family \
         that mixes them"
    )]
    Mixed {
        /// Key.
        key: &'static str,
        /// The norm, by which families are told apart.
        norm: &'static str,
        /// The family.
        family: &'static str,
        /// What it has there.
        expected: &'static str,
    },
    /// A rate that drops everything, or less than nothing.
    #[error("model.dropout = {0}; it must be from 0 to below 1")]
    Dropout(f64),
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
    /// Which stages its blocks are made of.
    pub fn family(&self) -> Family {
        match self.norm {
            NormKind::Rms => Family::Llama,
            NormKind::Layer => Family::Gpt2,
        }
    }

    /// Refuses features of one family in a model of the other.
    fn check_family(&self) -> Result<(), ConfigError> {
        let is_gpt2 = self.family() == Family::Gpt2;
        let expected = |llama, gpt2| if is_gpt2 { gpt2 } else { llama };
        let gelu = self.activation == ActivationFunction::GeluTanh;
        let learned = self.positions == Positions::Learned;
        let square = self.kv_heads == self.heads && self.q_width() == self.hidden;
        let mixed = [
            (
                "activation",
                gelu != is_gpt2,
                expected("swiglu", "gelu_tanh"),
            ),
            (
                "positions",
                learned != is_gpt2,
                expected("rotary", "learned"),
            ),
            (
                "biases",
                self.biases != is_gpt2,
                expected("none there", "biases"),
            ),
            (
                "max_positions",
                self.max_positions.is_some() != is_gpt2,
                expected("no table of positions", "one row for each position"),
            ),
            ("dropout", self.dropout > 0.0 && !is_gpt2, "none"),
            (
                "tie_embeddings",
                is_gpt2 && !self.tie_embeddings,
                "a tied head",
            ),
            ("qkv_bias", is_gpt2 && self.qkv_bias, "model.biases instead"),
            ("qk_norm", is_gpt2 && self.qk_norm, "none"),
            (
                "rope_scaling",
                is_gpt2 && self.rope_scaling.is_some(),
                "none",
            ),
            (
                "kv_heads",
                is_gpt2 && !square,
                "as many key-value heads as heads, together hidden wide",
            ),
        ];
        match mixed.into_iter().find(|(_, is_wrong, _)| *is_wrong) {
            None => Ok(()),
            Some((key, _, what)) => Err(ConfigError::Mixed {
                key,
                norm: expected("rms", "layer"),
                family: expected("Llama-like", "GPT-2"),
                expected: what,
            }),
        }
    }

    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Refuses sizes whose products could not be counted.
    fn check_extent(&self) -> Result<(), ConfigError> {
        if self.layers > MOST_LAYERS {
            return Err(ConfigError::TooManyLayers(self.layers));
        }
        let real = |size: usize| size as f64;
        let heads = real(self.heads) + real(self.kv_heads);
        let block = real(self.hidden) * (2.0 * heads * real(self.head_dim) + 3.0 * real(self.ffn));
        let rows = 2.0 * real(self.vocab) + real(self.max_positions.unwrap_or(0));
        let parameters = real(self.layers) * block + rows * real(self.hidden);
        match parameters > MOST_PARAMETERS {
            true => Err(ConfigError::TooManyParameters(parameters)),
            false => Ok(()),
        }
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
            ("max_positions", self.max_positions.unwrap_or(1)),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(ConfigError::Zero(name));
        }
        self.check_extent()?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(ConfigError::HeadGroups {
                heads: self.heads,
                kv_heads: self.kv_heads,
            });
        }
        self.check_family()?;
        if self.positions == Positions::Rotary && !self.head_dim.is_multiple_of(2) {
            return Err(ConfigError::OddHeadDim(self.head_dim));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(ConfigError::Dropout(self.dropout));
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
