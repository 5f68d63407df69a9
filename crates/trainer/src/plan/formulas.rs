//! What the field's rules of thumb say, beside what the plan says.

use super::activations::{PlannedActivation, total_bytes};
use super::dtype_name;
use crate::settings::Settings;
use memory::DType;
use model::{Attention, Label};
use optim::{MasterFormat, MomentFormat};
use serde::Serialize;

/// One rule of thumb.
#[derive(Clone, Debug, Serialize)]
pub struct Formula {
    /// What it estimates, and its source.
    pub name: &'static str,
    /// The formula, in its own letters.
    pub formula: &'static str,
    /// What it says.
    pub bytes: u64,
    /// What the plan says of the same thing.
    pub plan_bytes: u64,
    /// Why the two differ.
    pub difference: String,
}

/// The rules for weights, gradients and optimizer states (`arena_bytes` in the plan), and for activations.
pub(super) fn formulas(
    settings: &Settings,
    parameters: usize,
    arena_bytes: u64,
    activations: &[PlannedActivation],
) -> Vec<Formula> {
    let of_label = |label| total_bytes(activations, label).all;
    let (all, scores) = (of_label(None), of_label(Some(Label::CoreAttn)));
    let anatomy = |name, formula, bytes: u64, difference: String| Formula {
        name,
        formula,
        bytes: bytes * parameters as u64,
        plan_bytes: arena_bytes,
        difference,
    };
    let here = recipe(settings);
    let padding = "; tensors are padded to 256 elements";
    vec![
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
        korthikanti(settings, "none", all),
        korthikanti(settings, "selective", all - scores),
        korthikanti(settings, "full", of_label(Some(Label::BlockInput))),
    ]
}

/// What this run keeps of a parameter, in words.
fn recipe(settings: &Settings) -> String {
    let states = &settings.states;
    let weights = match (settings.dtype, states.master) {
        (DType::BF16, MasterFormat::F32) => "bf16 weights with an f32 master",
        (DType::BF16, MasterFormat::Remainder) => "bf16 weights with a 16-bit remainder",
        (DType::BF16, MasterFormat::None) => "bf16 weights without a master",
        _ => "f32 weights, which need no master",
    };
    let moments = match states.moments {
        MomentFormat::F32 => "f32",
        MomentFormat::Bf16 => "bf16",
        MomentFormat::Quantised => "8-bit",
    };
    let gradients = dtype_name(states.gradients);
    format!("here: {weights}, {gradients} gradients, {moments} moments")
}

/// Activations of all layers for one micro-batch, by Korthikanti et al. 2022, in 16 bits.
fn korthikanti(settings: &Settings, mode: &str, plan_bytes: u64) -> Formula {
    let config = &settings.model;
    let sbh = (settings.seq * settings.micro_batch * config.hidden) as f64;
    let scores = 5.0 * (config.heads * settings.seq) as f64 / config.hidden as f64;
    let (name, formula, factor) = match mode {
        "none" => (
            "activations, all kept (Korthikanti et al. 2022)",
            "L s b h (34 + 5 a s / h)",
            34.0 + scores,
        ),
        "selective" => (
            "activations, selective recompute (Korthikanti et al. 2022)",
            "34 L s b h",
            34.0,
        ),
        _ => (
            "activations, full recompute (Korthikanti et al. 2022)",
            "2 L s b h",
            2.0,
        ),
    };
    let mut reasons = vec![];
    if mode == "none" && settings.attention == Attention::Flash {
        reasons.push("it counts stored scores, which flash attention does not have".into());
    }
    if mode != "full" {
        reasons.push(
            "it counts a GPT layer with dropout masks and a feed-forward width of 4 h".to_string(),
        );
        let ratio = config.ffn as f64 / config.hidden as f64;
        reasons.push(format!(
            "here gate, up and act of {ratio:.2} h each and no masks"
        ));
        if config.kv_heads < config.heads {
            reasons.push(format!(
                "{} key-value heads for {} query heads",
                config.kv_heads, config.heads
            ));
        }
    }
    if settings.dtype == DType::F32 {
        reasons.push("f32 takes twice the bytes".into());
    }
    if mode == "full" {
        reasons.push("the plan's figure is the block inputs".into());
    }
    Formula {
        name,
        formula,
        bytes: (config.layers as f64 * sbh * factor) as u64,
        plan_bytes,
        difference: reasons.join("; "),
    }
}
