//! Errors in a model's configuration.

/// The most layers that a model may have.
pub(crate) const MOST_LAYERS: usize = 1 << 16;

/// What is wrong with a model's shape.
#[derive(Debug, thiserror::Error, PartialEq)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum ModelConfigError {
    /// A size is zero.
    #[error("model.{0} is 0; every size of a model is at least 1")]
    Zero(&'static str),
    /// More layers than any model has; listing them would take long.
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
    HeadGroups { heads: usize, kv_heads: usize },
    /// The rotary embedding pairs the two halves of what it turns.
    #[error(
        "model.head_dim = {head_dim} times model.rotary_share = {share} is {turned}, which is odd or 0; the rotary embedding pairs the two \
         halves of so many columns, choose an even number"
    )]
    OddRotary {
        head_dim: usize,
        share: f64,
        turned: usize,
    },
    /// A share that is none.
    #[error("model.rotary_share = {0}; it must be above 0 and at most 1")]
    RotaryShare(f64),
    /// Factors for pairs that do not exist, or not for all that do.
    #[error(
        "model.rope_scaling has {factors} factors in {list}; the rotary embedding turns {pairs} pairs of columns, and each needs one"
    )]
    LongFactors {
        list: &'static str,
        factors: usize,
        pairs: usize,
    },
    /// A temperature without the positions that it counts.
    #[error(
        "model.query_temperature counts positions in units of model.rope_scaling.original_max_position, which is not set; set it"
    )]
    NoOriginal,
    /// A temperature is part of the table by which queries are turned.
    #[error(
        "model.query_temperature is for models in which all layers turn whole heads: set no_rope_layers to [] and rotary_share to 1, or \
         take a model without the temperature"
    )]
    TurnsInPart,
    /// Layers that are listed do not fit the model.
    #[error(
        "model.no_rope_layers = {listed:?}: the model has {layers} layers, counted from 0; write each at most once, in order"
    )]
    NoRopeLayers { listed: Vec<usize>, layers: usize },
    /// Layers with a window would turn as the others do.
    #[error(
        "model.window_rope_theta equals model.rope_theta, and nothing is stretched; leave it out"
    )]
    SameRotary,
    /// A base for windows that no layer has.
    #[error(
        "model.window_rope_theta is for layers with a window, and model.sliding_window is not set"
    )]
    NoWindow,
    /// The layers without a window do not fit the model.
    #[error("model.full_attention_layers = {0:?}: {1}")]
    FullLayers(Vec<usize>, String),
    /// No family has all features.
    #[error(
        "no family of models here has all features of this one, so what is saved could not be loaded elsewhere. The nearest is \
         {nearest}, whose files cannot say {lacked}: change that; docs/guides/models.md has the families"
    )]
    NoFamily {
        nearest: &'static str,
        lacked: String,
    },
    /// The family that is named lacks features.
    #[error(
        "model.family is {family}, whose files cannot say {lacked}; change that, or take another family"
    )]
    NotInFamily {
        family: &'static str,
        lacked: String,
    },
    /// The experts do not fit together.
    #[error("model.experts: {0}")]
    Experts(String),
    /// Latent attention does not fit together.
    #[error("model.latent: {0}")]
    Latent(String),
    /// The gated delta rule does not fit together.
    #[error("model.delta: {0}")]
    Delta(String),
    /// A feature that blocks beside another lack.
    #[error("model.{key} does not go with model.{beside}: set it to {instead}")]
    NotBeside {
        key: &'static str,
        beside: &'static str,
        instead: &'static str,
    },
    /// A loss of routers in a model without any.
    #[error("model.{0} is set, and the model has no experts; leave it out")]
    NoRouters(&'static str),
    /// A rate that drops everything, or less than nothing.
    #[error("model.dropout = {0}; it must be from 0 to below 1")]
    Dropout(f64),
    /// A coefficient is out of its range.
    #[error("model.{name} = {value}; it must be a finite number, 0 or more")]
    Negative { name: &'static str, value: f64 },
    /// A real number is out of its range.
    #[error("model.{name} = {value}; it must be a finite number above 0")]
    NotPositive { name: &'static str, value: f64 },
}
