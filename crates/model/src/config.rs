//! The shape of a model: what `[model]` in a configuration and `config.json` in a Hugging Face folder both say.

use crate::{ExpertsConfig, LatentConfig, RopeScaling, RouterAuxKind, RouterLosses, ScoreKind};
use serde::{Deserialize, Serialize};

/// The shape of a decoder-only transformer: of the Llama family (Llama, Mistral, Qwen2, Qwen3, Phi-3, and with experts
/// Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and V3), or of GPT-2.
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
    /// The output projection of attention has a bias (Llama's and Qwen3's `attention_bias`, with that of q, k and v).
    #[serde(default)]
    pub o_bias: bool,
    /// The projections of the feed-forward layer have a bias (Llama's `mlp_bias`).
    #[serde(default)]
    pub mlp_bias: bool,
    /// q, k and v are one matrix in files, and gate and up another (Phi-3).
    #[serde(default)]
    pub fused_projections: bool,
    /// q and k are normalised per head before the rotary embedding (Qwen3).
    #[serde(default)]
    pub qk_norm: bool,
    /// The most keys that a query sees, its own included; absent: its own and all before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// Layers without the window, counted from 0 and in order.
    #[serde(default)]
    pub full_attention_layers: Vec<usize>,
    /// How the residual stream is normalised.
    #[serde(default)]
    pub norm: NormKind,
    /// The function between the feed-forward layer's products.
    #[serde(default)]
    pub activation: ActivationFunction,
    /// How tokens get their position.
    #[serde(default)]
    pub positions: PositionKind,
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
    /// How long rotary wavelengths are stretched; absent: not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Standard deviation of freshly initialised matrices.
    #[serde(default = "default_init_std")]
    pub init_std: f64,
    /// The coefficient of the routers' loss of balance; 0: none.
    #[serde(default)]
    pub router_aux: f64,
    /// Which choices and scores that loss takes together.
    #[serde(default)]
    pub router_aux_kind: RouterAuxKind,
    /// The coefficient of the mean squared log-sum-exp of the routers' logits; 0: none.
    #[serde(default)]
    pub router_z_loss: f64,
    /// A mixture of experts in place of the feed-forward layer; absent: all layers are dense.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertsConfig>,
    /// Latent attention; absent: queries, keys and values have a projection each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<LatentConfig>,
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

/// The function between the feed-forward layer's products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationFunction {
    /// silu(gate) up.
    #[default]
    Swiglu,
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

impl ActivationFunction {
    /// The names in settings.
    pub const NAMES: &'static [&'static str] = &["swiglu", "gelu_tanh"];
}

impl PositionKind {
    /// The names in settings.
    pub const NAMES: &'static [&'static str] = &["rotary", "learned"];
}

/// The family whose stages a model's blocks are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// RMSNorm, rotary embedding, SwiGLU.
    Llama,
    /// LayerNorm, learned positions, GELU, biases.
    Gpt2,
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

/// The most layers that a model may have.
const MOST_LAYERS: usize = 1 << 16;

/// The most parameters that a model may have, so that their bytes in any arena fit into 64 bits.
const MOST_PARAMETERS: f64 = (1_u64 << 48) as f64;

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
    /// The rotary embedding pairs the two halves of a head.
    #[error(
        "model.head_dim = {0} is odd; the rotary embedding pairs its two halves, choose an even width"
    )]
    OddHeadDim(usize),
    /// A feature of one family in a model of another.
    #[error(
        "model.{key} does not go with the rest of the model, which is of the family of {family}: these models have \
         {expected}; this trainer has no family that mixes them"
    )]
    Mixed {
        key: &'static str,
        family: &'static str,
        expected: &'static str,
    },
    /// The layers without a window do not fit the model.
    #[error("model.full_attention_layers = {0:?}: {1}")]
    FullLayers(Vec<usize>, String),
    /// Features that no one family has together.
    #[error(
        "no family that Hugging Face transformers knows has {0}; what is saved could not be loaded there. Llama has biases in \
         all of attention (model.qkv_bias and o_bias together) and in the feed-forward layer (mlp_bias), Qwen2 qkv_bias \
         alone, Qwen3 qk_norm with biases in all of attention or none, Phi-3 fused_projections with none of these and without \
         rope_scaling; a sliding window goes with Qwen2 and Qwen3, or in every layer with a model without biases (Mistral, \
         Phi-3)"
    )]
    NoFamily(String),
    /// The experts do not fit together.
    #[error("model.experts: {0}")]
    Experts(String),
    /// Latent attention does not fit together.
    #[error("model.latent: {0}")]
    Latent(String),
    /// A loss of routers in a model without any.
    #[error("model.{0} is set, and the model has no experts; leave it out")]
    NoRouters(&'static str),
    /// Features that no family with experts has together.
    #[error(
        "no family that Hugging Face transformers knows has these experts; what is saved could not be loaded there: {0}"
    )]
    NoFamilyOfExperts(String),
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

impl ModelConfig {
    /// The family whose stages its blocks are made of: the one that has most of its features.
    pub fn family(&self) -> Family {
        let of_gpt2 = [
            self.norm == NormKind::Layer,
            self.activation == ActivationFunction::GeluTanh,
            self.positions == PositionKind::Learned,
            self.max_positions.is_some(),
            self.biases,
        ];
        match 2 * of_gpt2.iter().filter(|is_so| **is_so).count() > of_gpt2.len() {
            true => Family::Gpt2,
            false => Family::Llama,
        }
    }

    /// Refuses features of one family in a model of the other.
    fn check_family(&self) -> Result<(), ModelConfigError> {
        let is_gpt2 = self.family() == Family::Gpt2;
        let expected = |llama, gpt2| if is_gpt2 { gpt2 } else { llama };
        let gelu = self.activation == ActivationFunction::GeluTanh;
        let learned = self.positions == PositionKind::Learned;
        let square = self.kv_heads == self.heads && self.q_width() == self.hidden;
        let layer_norm = self.norm == NormKind::Layer;
        let mixed = [
            ("norm", layer_norm != is_gpt2, expected("rms", "layer")),
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
            ("o_bias", is_gpt2 && self.o_bias, "model.biases instead"),
            ("mlp_bias", is_gpt2 && self.mlp_bias, "model.biases instead"),
            ("qk_norm", is_gpt2 && self.qk_norm, "none"),
            (
                "sliding_window",
                is_gpt2 && self.sliding_window.is_some(),
                "none",
            ),
            (
                "fused_projections",
                is_gpt2 && self.fused_projections,
                "a matrix of its own for all three",
            ),
            (
                "rope_scaling",
                is_gpt2 && self.rope_scaling.is_some(),
                "none",
            ),
            ("experts", is_gpt2 && self.experts.is_some(), "none"),
            ("latent", is_gpt2 && self.latent.is_some(), "none"),
            (
                "kv_heads",
                is_gpt2 && !square,
                "as many key-value heads as heads, together hidden wide",
            ),
        ];
        match mixed.into_iter().find(|(_, is_wrong, _)| *is_wrong) {
            None => Ok(()),
            Some((key, _, what)) => Err(ModelConfigError::Mixed {
                key,
                family: expected("Llama", "GPT-2"),
                expected: what,
            }),
        }
    }

    /// The window of a layer, if it has one.
    pub fn window(&self, layer: usize) -> Option<usize> {
        let is_full = self.full_attention_layers.contains(&layer);
        self.sliding_window.filter(|_| !is_full)
    }

    /// Hugging Face's name of the family like Llama that has these features.
    pub(crate) fn llama_like(&self) -> Result<&'static str, ModelConfigError> {
        if self.experts.is_some() || self.latent.is_some() {
            return self.with_experts();
        }
        let (qkv, o, mlp) = (self.qkv_bias, self.o_bias, self.mlp_bias);
        let (window, some_full) = (self.sliding_window, !self.full_attention_layers.is_empty());
        let is_plain = !qkv && !o && !mlp && !self.qk_norm && !some_full;
        let family = match () {
            () if self.fused_projections => {
                (is_plain && self.rope_scaling.is_none()).then_some("phi3")
            }
            () if self.qk_norm => (qkv == o && !mlp).then_some("qwen3"),
            () if qkv && !o => (!mlp).then_some("qwen2"),
            () if o && !qkv => None,
            () if window.is_none() => Some("llama"),
            () => is_plain.then_some("mistral"),
        };
        let features = [
            ("fused_projections", self.fused_projections),
            (
                "rope_scaling",
                self.fused_projections && self.rope_scaling.is_some(),
            ),
            ("qk_norm", self.qk_norm),
            ("qkv_bias", qkv),
            ("o_bias", o),
            ("mlp_bias", mlp),
            ("sliding_window", window.is_some()),
            ("full_attention_layers", some_full),
        ];
        family.ok_or_else(|| {
            let present = features.iter().filter(|(_, is_there)| *is_there);
            let names: Vec<String> = present.map(|(key, _)| format!("model.{key}")).collect();
            ModelConfigError::NoFamily(match &names[..] {
                [one] => format!("{one} alone"),
                several => several.join(" with "),
            })
        })
    }

    /// Hugging Face's name of the family with experts that has these features.
    fn with_experts(&self) -> Result<&'static str, ModelConfigError> {
        let refused = |problem: &str| Err(ModelConfigError::NoFamilyOfExperts(problem.into()));
        let Some(experts) = &self.experts else {
            return refused("model.latent goes with model.experts (DeepSeek-V2, V3)");
        };
        let never = [
            ("sliding_window", self.sliding_window.is_some()),
            ("fused_projections", self.fused_projections),
            ("mlp_bias", self.mlp_bias),
        ];
        if let Some((key, _)) = never.iter().find(|(_, is_there)| *is_there) {
            return refused(&format!("model.{key} goes with dense models alone"));
        }
        let is_softmax = experts.score == ScoreKind::Softmax;
        let has_shared = experts.shared_ffn > 0;
        let needs = |family, rules: &[(bool, &str)]| match rules.iter().find(|rule| !rule.0) {
            None => Ok(family),
            Some((_, rule)) => refused(&format!("in {family} {rule}")),
        };
        if self.latent.is_some() {
            let family = if is_softmax {
                "deepseek_v2"
            } else {
                "deepseek_v3"
            };
            let shared = has_shared && experts.shared_ffn.is_multiple_of(experts.ffn);
            return needs(
                family,
                &[
                    (
                        !self.qkv_bias && !self.o_bias && !self.qk_norm,
                        "attention has neither biases nor qk_norm",
                    ),
                    (self.kv_heads == self.heads, "kv_heads equals heads"),
                    (
                        shared && !experts.shared_gate,
                        "shared_ffn is a multiple of experts.ffn, without a gate",
                    ),
                    (
                        experts.first_dense().is_some(),
                        "dense_layers are the first ones",
                    ),
                    (
                        experts.choice_bias != is_softmax,
                        "sigmoid scores come with choice_bias, and softmax without",
                    ),
                    (
                        !is_softmax || !experts.normed,
                        "softmax scores are not normed",
                    ),
                ],
            );
        }
        let plain =
            is_softmax && experts.factor == 1.0 && experts.groups == 1 && !experts.choice_bias;
        let rules = [(
            plain,
            "scores are a plain softmax: factor, groups and choice_bias need model.latent",
        )];
        match () {
            () if has_shared => needs(
                "qwen2_moe",
                &[
                    rules[0],
                    (
                        self.qkv_bias && !self.o_bias && !self.qk_norm,
                        "there is qkv_bias alone, as with every shared_ffn without model.latent",
                    ),
                    (experts.shared_gate, "shared experts have shared_gate"),
                ],
            ),
            () if self.qk_norm => needs(
                "qwen3_moe",
                &[
                    rules[0],
                    (
                        self.qkv_bias == self.o_bias,
                        "all of attention has biases, or none",
                    ),
                ],
            ),
            () => needs(
                "mixtral",
                &[
                    rules[0],
                    (!self.qkv_bias && !self.o_bias, "there are no biases"),
                    (experts.normed, "weights are normed"),
                    (experts.dense_layers.is_empty(), "no layer is dense"),
                ],
            ),
        }
    }

    /// Refuses experts and latents that do not fit, and losses of routers without experts.
    fn check_experts(&self) -> Result<(), ModelConfigError> {
        let losses = [
            ("router_aux", self.router_aux),
            ("router_z_loss", self.router_z_loss),
        ];
        for (name, value) in losses {
            if !(value.is_finite() && value >= 0.0) {
                return Err(ModelConfigError::Negative { name, value });
            }
            if value > 0.0 && self.experts.is_none() {
                return Err(ModelConfigError::NoRouters(name));
            }
        }
        if let Some(experts) = &self.experts {
            let checked = experts.check(self.layers);
            checked.map_err(ModelConfigError::Experts)?;
        }
        match &self.latent {
            Some(latent) => {
                let checked = latent.check(self.head_dim);
                checked.map_err(ModelConfigError::Latent)
            }
            None => Ok(()),
        }
    }

    /// Refuses a list of layers without a window if the model has no window, if a layer does not exist, or if it is not
    /// in order.
    fn check_full_layers(&self) -> Result<(), ModelConfigError> {
        let layers = &self.full_attention_layers;
        let wrong = match layers.last() {
            None => return Ok(()),
            _ if self.sliding_window.is_none() => {
                "they differ from others by model.sliding_window, which is not set".into()
            }
            Some(last) if *last >= self.layers => {
                format!("the model has {} layers, counted from 0", self.layers)
            }
            _ if !layers.is_sorted_by(|one, next| one < next) => "write each once, in order".into(),
            _ if layers.len() == self.layers => {
                "no layer is left for model.sliding_window; leave both out".into()
            }
            _ => return Ok(()),
        };
        Err(ModelConfigError::FullLayers(layers.clone(), wrong))
    }

    /// The losses that routers add, if they add any.
    pub fn router_losses(&self) -> Option<RouterLosses> {
        let experts = self.experts.as_ref()?;
        let losses = RouterLosses {
            aux: self.router_aux,
            kind: self.router_aux_kind,
            choices: experts.chosen,
            z: self.router_z_loss,
        };
        (losses.aux > 0.0 || losses.z > 0.0).then_some(losses)
    }

    /// Columns of a head that the rotary embedding turns.
    pub fn rotary_dim(&self) -> usize {
        let latent = self.latent.as_ref();
        latent.map_or(self.head_dim, |latent| latent.rotary_dim)
    }

    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Refuses more layers or parameters than can be counted.
    ///
    /// # Errors
    /// With the most that there may be.
    pub fn check_extent(&self) -> Result<(), ModelConfigError> {
        if self.layers > MOST_LAYERS {
            return Err(ModelConfigError::TooManyLayers(self.layers));
        }
        let real = |size: usize| size as f64;
        let heads = real(self.heads) + real(self.kv_heads);
        let experts = self.experts.as_ref().map_or(0.0, |experts| {
            real(experts.count) * real(experts.ffn) + real(experts.shared_ffn)
        });
        let ffn = real(self.ffn) + experts;
        let block = real(self.hidden) * (2.0 * heads * real(self.head_dim) + 3.0 * ffn);
        let rows = 2.0 * real(self.vocab) + real(self.max_positions.unwrap_or(0));
        let parameters = real(self.layers) * block + rows * real(self.hidden);
        match parameters > MOST_PARAMETERS {
            true => Err(ModelConfigError::TooManyParameters(parameters)),
            false => Ok(()),
        }
    }

    /// Checks that the sizes make a model.
    ///
    /// # Errors
    /// The first key that is wrong, with what it should be.
    pub fn validate(&self) -> Result<(), ModelConfigError> {
        let sizes = [
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("vocab", self.vocab),
            ("max_positions", self.max_positions.unwrap_or(1)),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(ModelConfigError::Zero(name));
        }
        self.check_extent()?;
        self.check_experts()?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(ModelConfigError::HeadGroups {
                heads: self.heads,
                kv_heads: self.kv_heads,
            });
        }
        self.check_family()?;
        self.check_full_layers()?;
        if self.family() == Family::Llama {
            self.llama_like()?;
        }
        if self.positions == PositionKind::Rotary
            && self.latent.is_none()
            && !self.head_dim.is_multiple_of(2)
        {
            return Err(ModelConfigError::OddHeadDim(self.head_dim));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(ModelConfigError::Dropout(self.dropout));
        }
        let reals = [
            ("norm_eps", self.norm_eps),
            ("rope_theta", self.rope_theta),
            ("init_std", self.init_std),
        ];
        let scaling = self.rope_scaling.iter().flat_map(RopeScaling::positive);
        match reals
            .into_iter()
            .chain(scaling)
            .find(|(_, value)| !(value.is_finite() && *value > 0.0))
        {
            Some((name, value)) => Err(ModelConfigError::NotPositive { name, value }),
            None => Ok(()),
        }
    }
}
