//! OLMo 2: norms stand behind attention and the feed-forward layer, and those of queries and keys take all heads together.

use super::decoder::Assumed;
use super::{Description, ExpertNames, SavedAs, decoder, windows};
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::{ModelConfig, NormPlacement, QkNormExtent};
use serde_json::Value;

pub(super) const FAMILY: Description = Description {
    model_type: "olmo2",
    class: "Olmo2ForCausalLM",
    aliases: &[],
    experts: ExpertNames::USUAL,
    read,
    write,
};

const ASSUMED: Assumed = Assumed {
    norm_eps: 1e-5,
    ..Assumed::LLAMA
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    windows::refuse_types(keys)?;
    read_blocks(keys, &ASSUMED)
}

/// Reads what OLMo 2 and 3 have alike.
pub(super) fn read_blocks(keys: &Keys, assumed: &Assumed) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_experts()?;
    keys.refuse_mlp_bias()?;
    let has_bias = keys.flag_or("attention_bias", false)?;
    Ok(ModelConfig {
        qkv_bias: has_bias,
        o_bias: has_bias,
        qk_norm: true,
        qk_norm_over: QkNormExtent::All,
        norm_placement: NormPlacement::After,
        ..decoder::read(keys, assumed)?
    })
}

/// Writes that.
pub(super) fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    // The default of transformers is a token of its own vocabulary.
    json["pad_token_id"] = Value::Null;
    json
}
