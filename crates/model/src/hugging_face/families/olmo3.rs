//! OLMo 3: OLMo 2 with windows in most layers, which have a rotary embedding of their own.

use super::decoder::Assumed;
use super::{Description, SavedAs, decoder, olmo2, windows};
use crate::ModelConfig;
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::hugging_face::rope::{self, AssumedRope, RopeByKind};
use serde_json::Value;

pub(super) const FAMILY: Description = Description::new(["olmo3", "Olmo3ForCausalLM"], read, write);

const ASSUMED: Assumed = Assumed {
    norm_eps: 1e-5,
    rope: ROPE.full,
    ..Assumed::LLAMA
};

const ROPE: RopeByKind = RopeByKind {
    full: OF_A_KIND,
    sliding: OF_A_KIND,
    sliding_theta: None,
};

const OF_A_KIND: AssumedRope = AssumedRope {
    theta: 5e5,
    ..AssumedRope::LLAMA
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    let [of_full, of_window] = rope::read_by_kind(keys, &ROPE)?;
    let config = decoder::read_with(keys, &ASSUMED, of_full.clone())?;
    let config = olmo2::blocks(keys, config)?;
    let config = windows::read_by_pattern(keys, config, (windows::ASSUMED, 4))?;
    windows::with_rope(keys, config, &of_full, of_window)
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = decoder::write(config, saved);
    rope::write_by_kind(config, &mut json);
    windows::write_by_pattern(config, &mut json);
    json
}
