//! Qwen3-Next: layers with the gated delta rule, whose files have projections by key head, and experts beside a shared one.

use super::decoder::Assumed;
use super::{Description, SavedAs, experts, gated_delta, windows};
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::{ExpertsConfig, ModelConfig};
use serde_json::Value;

pub(super) const FAMILY: Description =
    Description::new(["qwen3_next", "Qwen3NextForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(2),
    vocab: Some(151_936),
    ..gated_delta::ASSUMED
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    windows::refuse_used(keys)?;
    let config = gated_delta::read(keys, &ASSUMED, true)?;
    let of_file = gated_delta::experts(keys, [512, 10, 512], config.layers)?;
    Ok(ModelConfig {
        experts: Some(ExpertsConfig {
            normed: keys.flag_or("norm_topk_prob", true)?,
            ..of_file
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
