//! OLMo 2: norms stand behind attention and the feed-forward layer, and those of queries and keys take all heads together.

use super::decoder::Assumed;
use super::{Description, decoder, windows};
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::{ModelConfig, NormPlacement, QkNormExtent};

pub(super) const FAMILY: Description =
    Description::new(["olmo2", "Olmo2ForCausalLM"], read, decoder::write);

const ASSUMED: Assumed = Assumed {
    norm_eps: 1e-5,
    ..Assumed::LLAMA
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    windows::refuse_types(keys)?;
    blocks(keys, decoder::read(keys, &ASSUMED)?)
}

/// The same model with what OLMo 2 and 3 have alike.
pub(super) fn blocks(keys: &Keys, config: ModelConfig) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_experts()?;
    keys.refuse_mlp_bias()?;
    Ok(ModelConfig {
        qk_norm: true,
        qk_norm_over: QkNormExtent::All,
        norm_placement: NormPlacement::After,
        ..decoder::with_attention_bias(keys, config)?
    })
}
