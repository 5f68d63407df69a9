//! The text part of Qwen3.5 and 3.6 with experts in all layers, beside a shared one.

use super::decoder::Assumed;
use super::{Description, SavedAs, experts, gated_delta, windows};
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::{ExpertsConfig, ModelConfig};
use serde_json::{Value, json};

pub(super) const FAMILY: Description =
    Description::new(["qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(2),
    vocab: Some(248_320),
    ..gated_delta::ASSUMED
};

/// Its class does not read the keys of layers without experts, and always norms weights.
fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    windows::refuse_used(keys)?;
    let ignored = [
        ("mlp_only_layers", json!([])),
        ("decoder_sparse_step", json!(1)),
        ("norm_topk_prob", json!(true)),
    ];
    for (key, plain) in ignored {
        keys.refuse(key, !keys.is_null(key) && *keys.get(key) != plain)?;
    }
    let mut with_width = keys.0.clone();
    // No layer is dense, and files do not say how wide one would be.
    with_width["intermediate_size"] = json!(keys.size_or("moe_intermediate_size", 512)?);
    let keys = &Keys(&with_width);
    let config = gated_delta::read(keys, &ASSUMED, false)?;
    Ok(ModelConfig {
        experts: Some(ExpertsConfig {
            normed: true,
            ..gated_delta::experts(keys, [256, 8, 512], config.layers)?
        }),
        router_aux: experts::aux(keys)?,
        ..config
    })
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = gated_delta::write(config, saved);
    gated_delta::write_experts(config, &mut json);
    json
}
