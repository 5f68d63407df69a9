//! Mixtral: Mistral with experts in all layers, and without a window.

use super::decoder::Assumed;
use super::{Description, ExpertNames, ExpertTensors, SavedAs, decoder, experts, windows};
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope;
use crate::{ExpertsConfig, ModelConfig};
use serde_json::{Value, json};

pub(super) const FAMILY: Description = Description {
    aliases: &[("num_experts", "num_local_experts")],
    experts: ExpertNames {
        router: "block_sparse_moe.gate",
        tensors: ExpertTensors::ByExpert {
            module: "block_sparse_moe",
            up: &["w1", "w3"],
            down: &["w2"],
        },
    },
    ..Description::new(["mixtral", "MixtralForCausalLM"], read, write)
};

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(8),
    norm_eps: 1e-5,
    rope: rope::AssumedRope {
        theta: 1e6,
        ..rope::AssumedRope::LLAMA
    },
    ..Assumed::LLAMA
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_mlp_bias()?;
    windows::refuse_types(keys)?;
    let jitters = keys.number_or("router_jitter_noise", 0.0)? != 0.0;
    keys.refuse("router_jitter_noise", jitters)?;
    keys.refuse("sliding_window", !keys.is_null("sliding_window"))?;
    let config = decoder::read(keys, &ASSUMED)?;
    let sizes = [
        keys.size_or("num_local_experts", 8)?,
        keys.size_or("num_experts_per_tok", 2)?,
        config.ffn,
    ];
    Ok(ModelConfig {
        experts: Some(ExpertsConfig::plain(sizes)),
        router_aux: experts::aux(keys)?,
        ..config
    })
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let experts = experts::of(config);
    let mut json = decoder::write(config, saved);
    json["num_experts_per_tok"] = json!(experts.chosen);
    json["num_local_experts"] = json!(experts.count);
    json["intermediate_size"] = json!(experts.ffn);
    json["sliding_window"] = Value::Null;
    experts::write_aux(config, &mut json);
    json
}
