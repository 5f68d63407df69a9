//! The keys that most families share.

use super::SavedAs;
use crate::config_error::MOST_LAYERS;
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope::{self, Rope};
use crate::{ModelConfig, ModelConfigError, PositionKind, RopeScaling};
use serde_json::{Value, json};

/// What transformers' class assumes of keys that a file leaves out.
pub(super) struct Assumed {
    /// Heads; none: a file has to say.
    pub(super) heads: Option<usize>,
    /// Tokens of the vocabulary; none: a file has to say.
    pub(super) vocab: Option<usize>,
    /// Heads of keys and values; none: as many as heads. Null in a file means the latter, whatever the class assumes.
    pub(super) kv_heads: Option<usize>,
    /// Width of a head; none: `hidden_size` divided by the heads.
    pub(super) head_dim: Option<usize>,
    /// Added inside norms.
    pub(super) norm_eps: f64,
    /// A tied head.
    pub(super) tied: bool,
    /// The key of the activation function, and the only one that the family has here.
    pub(super) activation: [&'static str; 2],
    /// The rotary embedding.
    pub(super) rope: rope::AssumedRope,
}

impl Assumed {
    /// What Llama's class assumes.
    pub(super) const LLAMA: Assumed = Assumed {
        heads: None,
        vocab: None,
        kv_heads: None,
        head_dim: None,
        norm_eps: 1e-6,
        tied: false,
        activation: ["hidden_act", "silu"],
        rope: rope::AssumedRope::LLAMA,
    };
}

/// A model with RMSNorm, SwiGLU and a rotary embedding. What a family has beyond that is added by its file.
pub(super) fn read(keys: &Keys, assumed: &Assumed) -> Result<ModelConfig, HfConfigError> {
    read_with(keys, assumed, rope::read(keys, &assumed.rope)?)
}

/// The same with a rotary embedding that was read in another way.
pub(super) fn read_with(
    keys: &Keys,
    assumed: &Assumed,
    rope: Rope,
) -> Result<ModelConfig, HfConfigError> {
    let mut config = read_with_scores_of_latents(keys, assumed, rope)?;
    if let Some(RopeScaling::Yarn { mscale_all_dim, .. }) = &mut config.rope_scaling {
        *mscale_all_dim = None;
    }
    Ok(config)
}

/// The same, where YaRN's `mscale_all_dim` changes the scores too, as in latent attention alone.
pub(super) fn read_with_scores_of_latents(
    keys: &Keys,
    assumed: &Assumed,
    rope: Rope,
) -> Result<ModelConfig, HfConfigError> {
    let [activation, known] = assumed.activation;
    keys.refuse_other(activation, &[known])?;
    for key in ["attention_dropout", "resid_pdrop", "embd_pdrop"] {
        let drops = keys.get(key).as_f64().is_some_and(|rate| rate > 0.0);
        keys.refuse(key, drops)?;
    }
    let size = |key, assumed: Option<usize>| match assumed {
        Some(assumed) => keys.size_or(key, assumed),
        None => keys.size(key),
    };
    let hidden = keys.size("hidden_size")?;
    let heads = size("num_attention_heads", assumed.heads)?;
    let kv_heads = keys.optional_size_or("num_key_value_heads", assumed.kv_heads)?;
    let head_dim = assumed.head_dim.unwrap_or(hidden / heads.max(1));
    Ok(ModelConfig {
        hidden,
        layers: layers(keys)?,
        heads,
        kv_heads: kv_heads.unwrap_or(heads),
        head_dim: keys.size_or("head_dim", head_dim)?,
        ffn: keys.size("intermediate_size")?,
        vocab: size("vocab_size", assumed.vocab)?,
        tie_embeddings: keys.flag_or("tie_word_embeddings", assumed.tied)?,
        positions: PositionKind::Rotary,
        norm_eps: keys.number_or("rms_norm_eps", assumed.norm_eps)?,
        rope_theta: rope.theta,
        rope_scaling: rope.scaling,
        rotary_share: rope.share,
        init_std: keys.number_or("initializer_range", 0.02)?,
        ..ModelConfig::PLAIN
    })
}

/// The same model with biases in all of attention, if `attention_bias` says so.
pub(super) fn with_attention_bias(
    keys: &Keys,
    config: ModelConfig,
) -> Result<ModelConfig, HfConfigError> {
    let has_bias = keys.flag_or("attention_bias", false)?;
    Ok(ModelConfig {
        qkv_bias: has_bias,
        o_bias: has_bias,
        ..config
    })
}

/// How many layers the model has: no more than can be listed.
fn layers(keys: &Keys) -> Result<usize, HfConfigError> {
    match keys.size("num_hidden_layers")? {
        layers if layers > MOST_LAYERS => Err(ModelConfigError::TooManyLayers(layers).into()),
        layers => Ok(layers),
    }
}

/// The keys of such a model.
pub(super) fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    json!({
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.o_bias,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling.as_ref().map(rope::written),
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "max_position_embeddings": rope::max_position(config, saved.seq),
        "bos_token_id": null,
        "eos_token_id": null,
        // Some classes assume a token here, which transformers refuses if the vocabulary is smaller, and does not train.
        "pad_token_id": null,
        "torch_dtype": saved.dtype,
    })
}
