//! Gemma 3: norms of queries and keys, and a rotary embedding of its own in layers with a window, five of six.

use super::decoder::Assumed;
use super::{Description, SavedAs, gemma, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope::{self, AssumedRope, RopeByKind};
use serde_json::Value;

pub(super) const FAMILY: Description =
    Description::new(["gemma3_text", "Gemma3ForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    vocab: Some(262_208),
    ..gemma::ASSUMED
};

const ROPE: RopeByKind = RopeByKind {
    full: AssumedRope {
        theta: 1e6,
        ..AssumedRope::LLAMA
    },
    sliding: AssumedRope::LLAMA,
    sliding_theta: Some("rope_local_base_freq"),
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    // Its class reads the key and never applies it.
    const CAP: &str = "attn_logit_softcapping";
    keys.refuse(CAP, !keys.is_null(CAP))?;
    let [of_full, of_window] = rope::read_by_kind(keys, &ROPE)?;
    let pattern = keys.size_or("sliding_window_pattern", 6)?;
    let config = ModelConfig {
        qk_norm: true,
        ..gemma::read(keys, (&ASSUMED, of_full.clone()), (pattern, None))?
    };
    windows::with_rope(keys, config, &of_full, of_window)
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = gemma::write(config, saved);
    rope::write_by_kind(config, &mut json);
    json
}
