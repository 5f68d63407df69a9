//! The `config.json` of Llama and of the families like it: Mistral, Qwen2, Qwen3, Phi-3.

use super::keys::{HfConfigError, causal_lm, flag, number, size, size_or};
use super::{experts, rope};
use crate::config::{ActivationFunction, NormKind, PositionKind};
use crate::{ModelConfig, RopeScaling};
use serde_json::{Value, json};

/// The families whose `attention_bias` is read; where it does not fit the rest, the model is refused.
const HAVE_ATTENTION_BIAS: [&str; 5] =
    ["llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"];

/// The window that transformers assumes for a file that does not mention one. Phi-3 then has none.
const DEFAULT_WINDOW: usize = 4096;

/// How many of the first layers have no window if a file of Qwen does not say.
const DEFAULT_WINDOW_LAYERS: usize = 28;

/// The names in `layer_types` of layers with a window and of those without.
const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

/// The shape that the keys of Llama or a family like it describe.
pub(super) fn read(json: &Value, family: &str) -> Result<ModelConfig, HfConfigError> {
    refuse_unsupported(json, family)?;
    let size = |key| size(json, key);
    let (hidden, heads) = (size("hidden_size")?, size("num_attention_heads")?);
    let layers = size("num_hidden_layers")?;
    let has_attention_bias = HAVE_ATTENTION_BIAS.contains(&family) && flag(json, "attention_bias")?;
    let has_qkv_bias = match family {
        "qwen2_moe" => json["qkv_bias"] != false,
        _ => family == "qwen2",
    };
    let (sliding_window, full_attention_layers) = window(json, family, layers)?;
    let config = ModelConfig {
        hidden,
        layers,
        heads,
        kv_heads: kv_heads(json, family, heads)?,
        head_dim: match family {
            "qwen3" => size_or(json, "head_dim", 128)?,
            _ => size_or(json, "head_dim", hidden / heads.max(1))?,
        },
        ffn: size("intermediate_size")?,
        vocab: size("vocab_size")?,
        tie_embeddings: flag(json, "tie_word_embeddings")?,
        qkv_bias: has_qkv_bias || has_attention_bias,
        o_bias: has_attention_bias,
        mlp_bias: family == "llama" && flag(json, "mlp_bias")?,
        fused_projections: family == "phi3",
        qk_norm: ["qwen3", "qwen3_moe"].contains(&family),
        sliding_window,
        full_attention_layers,
        norm: NormKind::Rms,
        activation: ActivationFunction::Swiglu,
        positions: PositionKind::Rotary,
        max_positions: None,
        biases: false,
        dropout: 0.0,
        norm_eps: match (number(json, "rms_norm_eps")?, family) {
            (Some(norm_eps), _) => norm_eps,
            (None, "phi3" | "mixtral") => 1e-5,
            (None, _) => 1e-6,
        },
        rope_theta: rope::theta(json, family)?,
        rope_scaling: rope::scaling(json)?,
        init_std: number(json, "initializer_range")?.unwrap_or(0.02),
        router_aux: 0.0,
        router_aux_kind: Default::default(),
        router_z_loss: 0.0,
        experts: None,
        latent: None,
    };
    experts::read(json, family, without_scale_of_latents(config, family))
}

/// Heads of keys and values: as many as heads if the key is null, and what the family's class assumes if it is missing.
fn kv_heads(json: &Value, family: &str, heads: usize) -> Result<usize, HfConfigError> {
    const KEY: &str = "num_key_value_heads";
    let assumed = match family {
        "mistral" | "mixtral" => 8,
        "qwen2" | "qwen3" => 32,
        "qwen2_moe" => 16,
        "qwen3_moe" => 4,
        _ => heads,
    };
    match json.get(KEY) {
        None => Ok(assumed),
        Some(_) => size_or(json, KEY, heads),
    }
}

/// Only latent attention multiplies scores by what YaRN's `mscale_all_dim` gives.
fn without_scale_of_latents(config: ModelConfig, family: &str) -> ModelConfig {
    let mut config = config;
    let is_latent = family.starts_with("deepseek");
    if let (false, Some(RopeScaling::Yarn { mscale_all_dim, .. })) =
        (is_latent, &mut config.rope_scaling)
    {
        *mscale_all_dim = None;
    }
    config
}

/// The window, if some layers have one, and the layers without it, as transformers reads them. Mistral and Phi-3 have
/// it in all layers. Qwen has it by `layer_types`, or from layer `max_window_layers` on.
fn window(
    json: &Value,
    family: &str,
    layers: usize,
) -> Result<(Option<usize>, Vec<usize>), HfConfigError> {
    // Null means none; only a key that is absent has the default.
    let mentioned = match json.get("sliding_window") {
        None => Some(DEFAULT_WINDOW).filter(|_| family != "phi3"),
        Some(Value::Null) => None,
        Some(_) => Some(size(json, "sliding_window")?),
    };
    let (window, full_layers) = match family {
        "mistral" | "phi3" => (mentioned, vec![]),
        "qwen2" | "qwen3" => {
            let is_used = flag(json, "use_sliding_window")?;
            (
                mentioned.filter(|_| is_used),
                full_layers(json, layers, is_used)?,
            )
        }
        _ => (None, vec![]),
    };
    match window {
        Some(window) if full_layers.len() < layers => Ok((Some(window), full_layers)),
        _ => Ok((None, vec![])),
    }
}

/// Qwen's layers without a window. The list is bounded, since `validate` refuses models of more layers.
fn full_layers(json: &Value, layers: usize, is_used: bool) -> Result<Vec<usize>, HfConfigError> {
    let types = &json["layer_types"];
    if types.is_null() {
        let first = size_or(json, "max_window_layers", DEFAULT_WINDOW_LAYERS)?;
        return Ok((0..first.min(layers).min(1 << 16)).collect());
    }
    let expected = HfConfigError::Key("layer_types", "a name for each layer");
    let types = types.as_array().filter(|types| types.len() == layers);
    let types = types.ok_or(expected)?;
    let known = |kind: &&Value| **kind == FULL || (**kind == SLIDING && is_used);
    match types.iter().find(|kind| !known(kind)) {
        Some(other) => Err(HfConfigError::Unsupported("layer_types", other.to_string())),
        None => Ok((0..layers).filter(|layer| types[*layer] == FULL).collect()),
    }
}

/// The keys of Llama or a family like it for this shape.
pub(super) fn write(config: &ModelConfig, seq: usize, dtype: &str) -> Value {
    let family = config.llama_like();
    let family = family.expect("it was refused where the configuration was read");
    let max_position = rope::max_position(config, seq);
    let mut json = json!({
        "architectures": [causal_lm(family)],
        "model_type": family,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.o_bias || (config.qkv_bias && family == "qwen2"),
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling.as_ref().map(rope::written),
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "bos_token_id": null,
        "eos_token_id": null,
        "torch_dtype": dtype,
    });
    experts::write(config, family, &mut json);
    if config.mlp_bias {
        json["mlp_bias"] = json!(true);
    }
    if family == "phi3" {
        // The default of transformers, 32000, is refused if the vocabulary is smaller.
        json["pad_token_id"] = Value::Null;
    }
    match config.sliding_window {
        Some(window) => {
            json["sliding_window"] = json!(window);
            if family.starts_with("qwen") {
                write_layers(config, &mut json);
            }
        }
        // transformers has defaults for these keys; other readers have none.
        None if family == "qwen2" => {
            json["use_sliding_window"] = json!(false);
            json["sliding_window"] = json!(max_position);
            json["max_window_layers"] = json!(config.layers);
        }
        None => {}
    }
    json
}

/// Writes which layers have the window: the type of each layer and, for readers that ignore types, how many layers come
/// before the first with a window.
fn write_layers(config: &ModelConfig, json: &mut Value) {
    let windows: Vec<_> = (0..config.layers)
        .map(|layer| config.window(layer))
        .collect();
    let kind = |window: &Option<usize>| if window.is_some() { SLIDING } else { FULL };
    let before = windows.iter().take_while(|window| window.is_none()).count();
    json["use_sliding_window"] = json!(true);
    json["max_window_layers"] = json!(before);
    json["layer_types"] = windows.iter().map(kind).collect();
}

/// Features that the forward pass does not have.
fn refuse_unsupported(json: &Value, family: &str) -> Result<(), HfConfigError> {
    type IsRefused = fn(&Value) -> bool;
    let drops = |value: &Value| value.as_f64().is_some_and(|rate| rate > 0.0);
    let refused: [(&'static str, IsRefused); 5] = [
        ("hidden_act", |value| !(value.is_null() || value == "silu")),
        ("attention_dropout", drops),
        ("resid_pdrop", drops),
        ("embd_pdrop", drops),
        ("num_experts", |value| {
            value.as_u64().is_some_and(|experts| experts > 1)
        }),
    ];
    let is_known = |key: &str| match key {
        "num_experts" => experts::are_in(family),
        _ => false,
    };
    let mut refused = refused.iter().filter(|(key, _)| !is_known(key));
    let refused = refused.find(|(key, wrong)| wrong(&json[*key]));
    let refused = refused.map(|(key, _)| (*key, json[*key].to_string()));
    // This family's classes ignore these keys, so a file that sets them describes another model.
    let has_types = ["qwen2", "qwen3"].contains(&family);
    let mut kinds = json["layer_types"].as_array().into_iter().flatten();
    let of_another = match () {
        () if family != "llama" && json["mlp_bias"] == true => Some(("mlp_bias", "true".into())),
        () if !has_types && kinds.any(|kind| *kind != FULL) => {
            Some(("layer_types", json["layer_types"].to_string()))
        }
        () => None,
    };
    match refused.or(of_another) {
        Some((key, value)) => Err(HfConfigError::Unsupported(key, value)),
        None => Ok(()),
    }
}
