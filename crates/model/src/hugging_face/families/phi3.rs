//! Phi-3 and Phi-4-mini: q, k and v are one matrix in files, and gate and up another; a share of each head is turned, and
//! wavelengths are stretched by LongRoPE.

use super::decoder::Assumed;
use super::{Description, SavedAs, decoder, windows};
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope;
use crate::{ModelConfig, RopeScaling};
use serde_json::{Value, json};

pub(super) const FAMILY: Description = Description::new(["phi3", "Phi3ForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    norm_eps: 1e-5,
    rope: rope::AssumedRope {
        share: Some(1.0),
        ..rope::AssumedRope::LLAMA
    },
    ..Assumed::LLAMA
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_experts()?;
    keys.refuse_mlp_bias()?;
    windows::refuse_types(keys)?;
    let config = ModelConfig {
        fused_projections: true,
        ..decoder::read_with(keys, &ASSUMED, rope::read_phi3(keys, &ASSUMED.rope)?)?
    };
    Ok(windows::with(
        config,
        windows::size(keys, None)?,
        Vec::new(),
    ))
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    if let Some(window) = config.sliding_window {
        json["sliding_window"] = json!(window);
    }
    if config.rotary_share != 1.0 {
        json["partial_rotary_factor"] = json!(config.rotary_share);
    }
    if let Some(RopeScaling::LongRope {
        original_max_position,
        ..
    }) = &config.rope_scaling
    {
        json["original_max_position_embeddings"] = json!(original_max_position);
    }
    json
}
