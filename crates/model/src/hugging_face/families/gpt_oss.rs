//! gpt-oss: sinks in attention, experts with biases and a clamped SwiGLU in all layers, and windows in every other one.

use super::decoder::Assumed;
use super::{Description, ExpertNames, ExpertTensors, SavedAs, decoder, experts, windows};
use crate::features::ActivationFunction;
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope;
use crate::{ExpertsConfig, ModelConfig};
use serde_json::{Value, json};

pub(super) const FAMILY: Description = Description {
    aliases: &[("num_experts", "num_local_experts")],
    experts: ExpertNames {
        router: "mlp.router",
        tensors: ExpertTensors::Interleaved,
    },
    ..Description::new(["gpt_oss", "GptOssForCausalLM"], read, write)
};

const ASSUMED: Assumed = Assumed {
    heads: Some(64),
    vocab: Some(201_088),
    kv_heads: Some(8),
    head_dim: Some(64),
    norm_eps: 1e-5,
    rope: rope::AssumedRope {
        theta: 150_000.0,
        ..rope::AssumedRope::LLAMA
    },
    ..Assumed::LLAMA
};

const ALPHA: &str = "swiglu_alpha";
const LIMIT: &str = "swiglu_limit";

/// The rotary embedding that the class has for a file without one.
fn assumed_rope() -> Value {
    json!({
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
    })
}

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_mlp_bias()?;
    let json = rope::with_assumed(keys, assumed_rope())?;
    let keys = Keys(&json);
    let config = decoder::read(&keys, &ASSUMED)?;
    let has_bias = keys.flag_or("attention_bias", true)?;
    let sizes = [
        keys.size_or("num_local_experts", 128)?,
        keys.size_or("num_experts_per_tok", 4)?,
        config.ffn,
    ];
    let experts = ExpertsConfig {
        biases: true,
        ..ExpertsConfig::plain(sizes)
    };
    let config = ModelConfig {
        qkv_bias: has_bias,
        o_bias: has_bias,
        attention_sinks: true,
        activation: ActivationFunction::ClampedSwiglu,
        swiglu_alpha: keys.number_or(ALPHA, 1.702)?,
        swiglu_limit: keys.number_or(LIMIT, 7.0)?,
        experts: Some(experts),
        router_aux: experts::aux(&keys)?,
        ..config
    };
    windows::read_by_pattern(&keys, config, (128, 2))
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let experts = experts::of(config);
    let mut json = decoder::write(config, saved);
    json["num_experts_per_tok"] = json!(experts.chosen);
    json["num_local_experts"] = json!(experts.count);
    json["intermediate_size"] = json!(experts.ffn);
    json[ALPHA] = json!(config.swiglu_alpha);
    json[LIMIT] = json!(config.swiglu_limit);
    if config.rope_scaling.is_none() {
        // Where neither key is there, the class assumes YaRN.
        json["rope_scaling"] = json!({"rope_type": "default"});
    }
    windows::write_by_pattern(config, &mut json);
    experts::write_aux(config, &mut json);
    json
}
