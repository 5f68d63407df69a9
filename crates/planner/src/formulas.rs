//! Rules of thumb for bytes a parameter, beside the plan's own figures.

use memory::DType;
use optim::{MasterFormat, MomentFormat};
use serde::Serialize;
use settings::Settings;

/// One rule of thumb.
#[derive(Clone, Debug, Serialize)]
pub struct Formula {
    /// What it estimates, and its source.
    pub name: &'static str,
    /// The formula, in its own letters.
    pub formula: &'static str,
    /// Its result.
    pub bytes: u64,
    /// The plan's figure for the same thing.
    pub plan_bytes: u64,
    /// Why the two differ.
    pub difference: String,
}

/// The rules for weights, gradients and optimizer states (`arena_bytes` in the plan).
pub(crate) fn anatomies(settings: &Settings, parameters: usize, arena_bytes: u64) -> [Formula; 2] {
    let anatomy = |name, formula, bytes: u64, difference: String| Formula {
        name,
        formula,
        bytes: bytes * parameters as u64,
        plan_bytes: arena_bytes,
        difference,
    };
    let here = recipe(settings);
    let padding = "; tensors are padded to 256 elements";
    [
        anatomy(
            "18 bytes a parameter (Megatron-LM)",
            "2 weight + 4 gradient + 4 master + 8 moments",
            18,
            format!("{here}{padding}"),
        ),
        anatomy(
            "16 bytes a parameter (ZeRO, Rajbhandari et al. 2020)",
            "2 weight + 2 gradient + 4 master + 8 moments",
            16,
            format!("it counts 16-bit gradients; {here}{padding}"),
        ),
    ]
}

/// The formats in which this run keeps a parameter, in words.
fn recipe(settings: &Settings) -> String {
    let states = &settings.states;
    let weights = match (settings.dtype, states.master) {
        (DType::BF16, MasterFormat::F32) => "bf16 weights with an f32 master",
        (DType::BF16, MasterFormat::Remainder) => "bf16 weights with a 16-bit remainder",
        (DType::BF16, MasterFormat::RemainderByte) => "bf16 weights with 8 bits of a 24-bit master",
        (DType::BF16, MasterFormat::None) => "bf16 weights without a master",
        _ => "f32 weights, which need no master",
    };
    let moments = match states.moments {
        MomentFormat::F32 => "f32",
        MomentFormat::Bf16 => "bf16",
        MomentFormat::Quantised => "8-bit",
    };
    let gradients = states.gradients.as_str();
    let divided = settings.ranks.as_ref().map_or_else(String::new, |ranks| {
        format!(
            ", of one of {} ranks under --zero {}",
            ranks.rank.of,
            ranks.zero.stage()
        )
    });
    let frozen = match settings.freeze.is_empty() && settings.lora.is_none() {
        true => "",
        false => ", of what is trained; what is frozen has its weight alone",
    };
    let of_what = settings.optimizer.moments_of();
    format!("here: {weights}, {gradients} gradients, {moments} moments{of_what}{divided}{frozen}")
}
