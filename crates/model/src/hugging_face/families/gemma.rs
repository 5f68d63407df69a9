//! What Gemma 2 and 3 have alike: norms of 1 + their weight on both sides of sublayers, GELU as the function of the gate, a scaled
//! embedding, and a scale of scores that the file gives.

use super::decoder::{self, Assumed};
use super::{SavedAs, windows};
use crate::features::ActivationFunction;
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope::{AssumedRope, Rope};
use crate::{ModelConfig, NormPlacement};
use serde_json::{Value, json};

pub(super) const ASSUMED: Assumed = Assumed {
    heads: Some(8),
    kv_heads: Some(4),
    head_dim: Some(256),
    norm_eps: 1e-6,
    tied: true,
    activation: ["hidden_activation", "gelu_pytorch_tanh"],
    rope: AssumedRope::LLAMA,
    ..Assumed::LLAMA
};

/// Scores are divided by the root of this.
const SCALAR: &str = "query_pre_attn_scalar";

/// The cap of logits.
const FINAL_CAP: &str = "final_logit_softcapping";

/// The model of a file of either. Layers have windows as the file says, or else all but every `pattern`th. The class assumes this cap of
/// logits.
pub(super) fn read(
    keys: &Keys,
    (assumed, rope): (&Assumed, Rope),
    (pattern, final_cap): (usize, Option<f64>),
) -> Result<ModelConfig, HfConfigError> {
    const BOTH_WAYS: &str = "use_bidirectional_attention";
    keys.refuse(BOTH_WAYS, *keys.get(BOTH_WAYS) == true)?;
    keys.refuse_experts()?;
    keys.refuse_mlp_bias()?;
    let config = decoder::read_with(keys, assumed, rope)?;
    if config.heads > 0 && !config.hidden.is_multiple_of(config.heads) {
        let heads = "a multiple of `num_attention_heads`, as transformers wants it";
        return Err(HfConfigError::Key("hidden_size", heads));
    }
    let scalar = keys.size_or(SCALAR, 256)?;
    let multiplier = (scalar as f64).sqrt().recip();
    let config = ModelConfig {
        norm_placement: NormPlacement::Both,
        zero_centered_norm: true,
        activation: ActivationFunction::GegluTanh,
        scale_embedding: true,
        attention_multiplier: (scalar != config.head_dim).then_some(multiplier),
        final_logit_softcapping: keys.optional_number_or(FINAL_CAP, final_cap)?,
        ..decoder::with_attention_bias(keys, config)?
    };
    windows::read_by_pattern(keys, config, (windows::ASSUMED, pattern))
}

/// The keys of such a model.
pub(super) fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    let [key, activation] = ASSUMED.activation;
    json[key] = json!(activation);
    // transformers does not read this one, but vLLM and SGLang refuse Gemma 2 if it is another.
    json["hidden_act"] = json!(activation);
    let scalar = config.attention_multiplier.map(|one| one.powi(-2).round());
    // transformers takes whole numbers alone.
    json[SCALAR] = json!(scalar.map_or(config.head_dim, |scalar| scalar as usize));
    json[FINAL_CAP] = json!(config.final_logit_softcapping);
    windows::write_by_pattern(config, &mut json);
    json
}
