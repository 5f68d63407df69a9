//! The text part of Qwen3.5 and 3.6: layers with the gated delta rule, and a dense feed-forward layer.

use super::decoder::Assumed;
use super::{Description, gated_delta, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};

pub(super) const FAMILY: Description = Description::new(
    ["qwen3_5_text", "Qwen3_5ForCausalLM"],
    read,
    gated_delta::write,
);

const ASSUMED: Assumed = Assumed {
    kv_heads: Some(4),
    vocab: Some(248_320),
    ..gated_delta::ASSUMED
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    windows::refuse_used(keys)?;
    keys.refuse_experts()?;
    gated_delta::read(keys, &ASSUMED, false)
}
