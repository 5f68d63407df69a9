//! What other settings would change, each found by planning it.

use super::{Figures, figures};
use crate::failure::Failure;
use crate::settings::Settings;
use kernels::Target;
use memory::DType;
use model::Attention;
use optim::{MasterFormat, MomentFormat};
use serde::Serialize;

/// Specifications that the table of strategies compares.
pub const STRATEGIES: [&str; 9] = [
    "none",
    "core_attn",
    "layernorm",
    "mlp_act",
    "qkv",
    "mlp",
    "core_attn,layernorm,mlp_act",
    "core_attn,layernorm,mlp",
    "full",
];

/// One recompute specification under the same settings.
#[derive(Clone, Debug, Serialize)]
pub struct Strategy {
    /// The specification.
    pub recompute: String,
    /// The labels offloaded beside it: those of the settings, or `none` where the specification recomputes some of them.
    pub offload_activations: String,
    /// Its peak.
    pub peak_bytes: u64,
    /// Slab and everything that lives across steps.
    pub reserved_bytes: u64,
    /// Extra FLOPs over those of forward and backward.
    pub recompute_flops_fraction: f64,
}

impl Strategy {
    pub(super) fn offloads(&self) -> bool {
        self.offload_activations != "none"
    }
}

/// Another setting, everything else equal.
#[derive(Clone, Debug, Serialize)]
pub struct Effect {
    /// What is changed, and to what.
    pub change: String,
    /// The peak then.
    pub peak_bytes: u64,
    /// The peak then, less the plan's.
    pub difference_bytes: i64,
}

/// Plans every strategy that goes with the specifications of single layers.
pub(super) fn strategies(settings: &Settings, target: Target) -> Result<Vec<Strategy>, Failure> {
    let plan = |(spec, other): (&str, Settings)| {
        let offload_activations = other.policy.offloaded().to_string();
        let Figures {
            peak,
            reserved_bytes,
            recompute_flops_fraction,
            ..
        } = figures(&other, target)?;
        let recompute = spec.to_string();
        Ok(Strategy {
            recompute,
            offload_activations,
            peak_bytes: peak.bytes,
            reserved_bytes,
            recompute_flops_fraction,
        })
    };
    let others = STRATEGIES.into_iter();
    let others = others.filter_map(|spec| Some((spec, settings.with_recompute(spec)?)));
    others.map(plan).collect()
}

/// Plans what grouped heads, the chunked head, attention, accumulation and the formats of states change.
pub(super) fn effects(
    settings: &Settings,
    target: Target,
    peak_bytes: u64,
) -> Result<Vec<Effect>, Failure> {
    let tokens = settings.micro_batch * settings.seq;
    let mut changes: Vec<(String, Settings)> = Vec::new();
    let mut change = |name: String, edit: &dyn Fn(&mut Settings)| {
        let mut changed = settings.clone();
        edit(&mut changed);
        changes.push((name, changed));
    };
    if settings.model.kv_heads < settings.model.heads {
        let heads = settings.model.heads;
        change(
            format!("every query head with keys and values of its own (kv_heads = {heads})"),
            &|settings| {
                settings.model.kv_heads = heads;
            },
        );
    }
    if settings.head_chunk < tokens {
        change(
            format!("logits of all {tokens} tokens at once (head_chunk = {tokens})"),
            &|settings| {
                settings.head_chunk = tokens;
            },
        );
    }
    change(
        format!("twice the accumulation (accum = {})", 2 * settings.accum),
        &|settings| settings.accum *= 2,
    );
    change(
        format!(
            "twice the micro-batch (micro = {})",
            2 * settings.micro_batch
        ),
        &|settings| {
            settings.micro_batch *= 2;
        },
    );
    let (other, flag) = match settings.attention {
        Attention::Eager => (Attention::Flash, "scores never stored (--attention flash)"),
        Attention::Flash => (Attention::Eager, "scores stored (--attention eager)"),
    };
    change(flag.into(), &|settings| settings.attention = other);
    if settings.states.moments != MomentFormat::Quantised {
        change("8-bit moments (--state-dtype 8bit)".into(), &|settings| {
            settings.states.moments = MomentFormat::Quantised;
        });
    }
    if settings.dtype == DType::BF16 && settings.states.master == MasterFormat::F32 {
        change(
            "an exact master in 16 bits more (--master bf16-split)".into(),
            &|settings| settings.states.master = MasterFormat::Remainder,
        );
    }
    if settings.states.gradients == DType::F32 {
        change(
            "gradients accumulated in bf16 (--grad-dtype bf16)".into(),
            &|settings| settings.states.gradients = DType::BF16,
        );
    }
    let plan = |(change, settings): (String, Settings)| {
        let peak = figures(&settings, target)?.peak.bytes;
        Ok(Effect {
            change,
            peak_bytes: peak,
            difference_bytes: peak as i64 - peak_bytes as i64,
        })
    };
    changes.into_iter().map(plan).collect()
}
