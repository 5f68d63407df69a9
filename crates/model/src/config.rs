//! The shape of a model: what `[model]` in a configuration and `config.json` in a Hugging Face folder both say.

use crate::config_error::{MOST_LAYERS, ModelConfigError};
use crate::features::{ActivationFunction, NormKind, NormPlacement, PositionKind, QkNormExtent};
use crate::{
    DeltaConfig, ExpertsConfig, Family, LatentConfig, RopeScaling, RouterAuxKind, RouterLosses,
};
use serde::{Deserialize, Serialize};

/// The shape and the features of a decoder-only transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The family whose files it is written as; absent: the first that has all its features.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<Family>,
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
    /// q and k are normalised before the rotary embedding (Qwen3).
    #[serde(default)]
    pub qk_norm: bool,
    /// Extent of these norms.
    #[serde(default)]
    pub qk_norm_over: QkNormExtent,
    /// The most keys that a query sees, its own included; absent: its own and all before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// Layers without the window, counted from 0 and in order.
    #[serde(default)]
    pub full_attention_layers: Vec<usize>,
    /// How the residual stream is normalised.
    #[serde(default)]
    pub norm: NormKind,
    /// Where a block's norms stand.
    #[serde(default)]
    pub norm_placement: NormPlacement,
    /// Norms multiply by 1 + their weight (Gemma).
    #[serde(default)]
    pub zero_centered_norm: bool,
    /// The function between the feed-forward layer's products.
    #[serde(default)]
    pub activation: ActivationFunction,
    /// The factor within the sigmoid of `clamped_swiglu`.
    #[serde(default = "default_swiglu_alpha")]
    pub swiglu_alpha: f64,
    /// Where `clamped_swiglu` clamps gate and up.
    #[serde(default = "default_swiglu_limit")]
    pub swiglu_limit: f64,
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
    /// Share of a head's columns that the rotary embedding turns: the first ones.
    #[serde(default = "one")]
    pub rotary_share: f64,
    /// Base of the wavelengths in layers with a window, where they are not stretched; absent: as in other layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_rope_theta: Option<f64>,
    /// Layers that turn nothing, counted from 0 and in order.
    #[serde(default)]
    pub no_rope_layers: Vec<usize>,
    /// Queries at a position are multiplied by 1 + this times ln(1 + floor(position / `rope_scaling.original_max_position`));
    /// absent: they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub query_temperature: Option<f64>,
    /// The embedding is multiplied by this.
    #[serde(default = "one")]
    pub embedding_multiplier: f64,
    /// The embedding is multiplied by sqrt(`hidden`), rounded to the type that is computed in (Gemma).
    #[serde(default)]
    pub scale_embedding: bool,
    /// Factor on the outputs of attention and of the feed-forward layer, before they are added to the residual stream.
    #[serde(default = "one")]
    pub residual_multiplier: f64,
    /// Attention's scores are multiplied by this; absent: by 1 / sqrt(`head_dim`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_multiplier: Option<f64>,
    /// Attention's scores s become c tanh(s / c), with this c; absent: they stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attn_logit_softcapping: Option<f64>,
    /// Logits z become c tanh(z / c), with this c; absent: they stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub final_logit_softcapping: Option<f64>,
    /// Every head has a learned score that joins its softmax and has no value (gpt-oss).
    #[serde(default)]
    pub attention_sinks: bool,
    /// Attention's output is multiplied by the sigmoid of a gate, which the projection of queries makes beside them (Qwen3-Next).
    #[serde(default)]
    pub attention_gate: bool,
    /// Logits are divided by this.
    #[serde(default = "one")]
    pub logits_scaling: f64,
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
    /// The gated delta rule in place of attention in some layers; absent: all layers have attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta: Option<DeltaConfig>,
}

fn default_norm_eps() -> f64 {
    1e-5
}

fn default_rope_theta() -> f64 {
    10_000.0
}

fn one() -> f64 {
    1.0
}

fn default_swiglu_alpha() -> f64 {
    1.702
}

fn default_swiglu_limit() -> f64 {
    7.0
}

fn default_init_std() -> f64 {
    0.02
}

/// The most parameters that a model may have, so that their bytes in any arena fit into 64 bits.
const MOST_PARAMETERS: f64 = (1_u64 << 48) as f64;

impl ModelConfig {
    /// Llama's features, without sizes.
    pub const PLAIN: ModelConfig = ModelConfig {
        family: None,
        hidden: 0,
        layers: 0,
        heads: 0,
        kv_heads: 0,
        head_dim: 0,
        ffn: 0,
        vocab: 0,
        tie_embeddings: false,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        fused_projections: false,
        qk_norm: false,
        qk_norm_over: QkNormExtent::Head,
        sliding_window: None,
        full_attention_layers: Vec::new(),
        norm: NormKind::Rms,
        norm_placement: NormPlacement::Before,
        zero_centered_norm: false,
        activation: ActivationFunction::Swiglu,
        swiglu_alpha: 1.702,
        swiglu_limit: 7.0,
        positions: PositionKind::Rotary,
        max_positions: None,
        biases: false,
        dropout: 0.0,
        norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        rotary_share: 1.0,
        window_rope_theta: None,
        no_rope_layers: Vec::new(),
        query_temperature: None,
        embedding_multiplier: 1.0,
        scale_embedding: false,
        residual_multiplier: 1.0,
        attention_multiplier: None,
        attn_logit_softcapping: None,
        final_logit_softcapping: None,
        attention_sinks: false,
        attention_gate: false,
        logits_scaling: 1.0,
        init_std: 0.02,
        router_aux: 0.0,
        router_aux_kind: RouterAuxKind::Pooled,
        router_z_loss: 0.0,
        experts: None,
        latent: None,
        delta: None,
    };

    /// Whether a layer has the gated delta rule in place of attention.
    pub fn has_delta(&self, layer: usize) -> bool {
        let delta = self.delta.as_ref();
        delta.is_some_and(|delta| !delta.attention_layers.contains(&layer))
    }

    /// Whether a layer's queries and keys are turned by the rotary embedding.
    pub fn turns(&self, layer: usize) -> bool {
        self.positions == PositionKind::Rotary && !self.no_rope_layers.contains(&layer)
    }

    /// The window of a layer, if it has one.
    pub fn window(&self, layer: usize) -> Option<usize> {
        let is_full = self.full_attention_layers.contains(&layer);
        self.sliding_window.filter(|_| !is_full)
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
        if let Some(latent) = &self.latent {
            let checked = latent.check(self.head_dim);
            checked.map_err(ModelConfigError::Latent)?;
        }
        if let Some(delta) = &self.delta {
            let checked = delta.check(self.layers);
            checked.map_err(ModelConfigError::Delta)?;
        }
        self.check_blocks()
    }

    /// Refuses what no block computes: a layer without a gate outside of GPT-2, and features that blocks with experts or latents lack.
    ///
    /// # Errors
    /// The first key that does not go with another, with what it should be.
    pub fn check_blocks(&self) -> Result<(), ModelConfigError> {
        let (experts, latent) = (self.experts.is_some(), self.latent.is_some());
        let behind = self.norm_placement.is_behind();
        let is_rotary = self.positions == PositionKind::Rotary;
        let has_no_gate = self.activation == ActivationFunction::GeluTanh;
        const GATED: &str = "swiglu, or another with a gate";
        const ABSENT: &str = "nothing, in a file without it";
        let after_rms = [("activation", has_no_gate, GATED)];
        let with_experts = [
            ("activation", has_no_gate, GATED),
            ("norm_placement", behind, "before"),
            ("residual_multiplier", self.residual_multiplier != 1.0, "1"),
        ];
        let with_latents = [
            ("norm_placement", behind, "before"),
            ("attention_sinks", self.attention_sinks, "false"),
            (
                "attention_multiplier",
                self.attention_multiplier.is_some(),
                ABSENT,
            ),
            ("no_rope_layers", !self.no_rope_layers.is_empty(), "[]"),
            ("rotary_share", self.rotary_share != 1.0, "1"),
            ("kv_heads", self.kv_heads != self.heads, "model.heads"),
            ("positions", !is_rotary, "rotary"),
        ];
        let with_gates = [
            ("qk_norm", !self.qk_norm, "true"),
            ("fused_projections", self.fused_projections, "false"),
            ("latent", latent, ABSENT),
            ("norm_placement", behind, "before"),
        ];
        let with_delta = [
            ("latent", latent, ABSENT),
            ("norm_placement", behind, "before"),
            ("sliding_window", self.sliding_window.is_some(), ABSENT),
            ("positions", !is_rotary, "rotary"),
            ("norm", self.norm == NormKind::Layer, "rms"),
        ];
        let is_rms = self.norm == NormKind::Rms;
        let tables: [(&str, bool, &[_]); 5] = [
            ("experts", experts, &with_experts),
            ("latent", latent, &with_latents),
            ("norm = \"rms\"", is_rms, &after_rms),
            ("attention_gate", self.attention_gate, &with_gates),
            ("delta", self.delta.is_some(), &with_delta),
        ];
        let tables = tables.into_iter().filter(|(_, applies, _)| *applies);
        let mut refused = tables.flat_map(|(beside, _, rules)| {
            let rules = rules.iter();
            rules.map(move |rule| (beside, *rule))
        });
        match refused.find(|(_, (_, is_there, _))| *is_there) {
            Some((beside, (key, _, instead))) => Err(ModelConfigError::NotBeside {
                key,
                beside,
                instead,
            }),
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
        match &self.latent {
            Some(latent) => latent.rotary_dim,
            None => (self.head_dim as f64 * self.rotary_share) as usize,
        }
    }

    /// Refuses a rotary embedding that does not fit heads, layers or windows.
    fn check_rotary(&self) -> Result<(), ModelConfigError> {
        let (head_dim, share, turned) = (self.head_dim, self.rotary_share, self.rotary_dim());
        if !(share > 0.0 && share <= 1.0) {
            return Err(ModelConfigError::RotaryShare(share));
        }
        if self.positions == PositionKind::Rotary && (turned == 0 || !turned.is_multiple_of(2)) {
            return Err(ModelConfigError::OddRotary {
                head_dim,
                share,
                turned,
            });
        }
        let scaling = self.rope_scaling.as_ref();
        for (list, factors) in scaling.into_iter().flat_map(RopeScaling::by_pair) {
            let (factors, pairs) = (factors.len(), turned / 2);
            if factors != pairs {
                return Err(ModelConfigError::LongFactors {
                    list,
                    factors,
                    pairs,
                });
            }
        }
        let original = scaling.and_then(RopeScaling::original_max_position);
        if self.query_temperature.is_some() && original.is_none() {
            return Err(ModelConfigError::NoOriginal);
        }
        let turns_all = share == 1.0 && self.no_rope_layers.is_empty() && self.latent.is_none();
        if self.query_temperature.is_some() && !turns_all {
            return Err(ModelConfigError::TurnsInPart);
        }
        if self.window_rope_theta.is_some() && self.sliding_window.is_none() {
            return Err(ModelConfigError::NoWindow);
        }
        if self.window_rope_theta == Some(self.rope_theta) && self.rope_scaling.is_none() {
            return Err(ModelConfigError::SameRotary);
        }
        let still = &self.no_rope_layers;
        match still.is_sorted_by(|one, next| one < next)
            && still.last().is_none_or(|last| *last < self.layers)
        {
            true => Ok(()),
            false => Err(ModelConfigError::NoRopeLayers {
                listed: still.clone(),
                layers: self.layers,
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

    /// Checks that the sizes make a model, and that a family of files has all its features.
    ///
    /// # Errors
    /// The first key that is wrong, with what it should be.
    pub fn validate(&self) -> Result<(), ModelConfigError> {
        self.check_sizes()?;
        self.family().map(|_| ())
    }

    /// Checks that the sizes make a model.
    pub(crate) fn check_sizes(&self) -> Result<(), ModelConfigError> {
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
        self.check_full_layers()?;
        self.check_rotary()?;
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(ModelConfigError::Dropout(self.dropout));
        }
        let reals = [
            ("norm_eps", self.norm_eps),
            ("rope_theta", self.rope_theta),
            ("init_std", self.init_std),
            (
                "window_rope_theta",
                self.window_rope_theta.unwrap_or(self.rope_theta),
            ),
            ("query_temperature", self.query_temperature.unwrap_or(1.0)),
            ("swiglu_alpha", self.swiglu_alpha),
            ("swiglu_limit", self.swiglu_limit),
            (
                "attn_logit_softcapping",
                self.attn_logit_softcapping.unwrap_or(1.0),
            ),
            (
                "final_logit_softcapping",
                self.final_logit_softcapping.unwrap_or(1.0),
            ),
            ("embedding_multiplier", self.embedding_multiplier),
            ("residual_multiplier", self.residual_multiplier),
            (
                "attention_multiplier",
                self.attention_multiplier.unwrap_or(1.0),
            ),
            ("logits_scaling", self.logits_scaling),
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
