//! What other settings would change, each found by planning it.

use super::{Figures, figures};
use crate::failure::Failure;
use crate::offload::OptimizerOffload;
use crate::settings::Settings;
use kernels::Target;
use memory::{DType, format_bytes};
use model::Attention;
use optim::{MasterFormat, MomentFormat};
use serde::Serialize;

/// Specifications that are compared for every model.
const STRATEGIES: [&str; 9] = [
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

/// Specifications that the table of strategies compares, and that an out-of-memory error tries: those that every model
/// has, and `full:uniform:N` for small N and for the root of the number of layers (Chen et al. 2016).
pub fn recompute_specs(layers: usize) -> Vec<String> {
    let root = (1..).find(|root| root * root >= layers).unwrap_or(layers);
    let mut chunks = vec![2, 4, root];
    chunks.sort();
    chunks.dedup();
    chunks.retain(|chunk| (2..=layers).contains(chunk));
    let uniform = chunks
        .into_iter()
        .map(|chunk| format!("full:uniform:{chunk}"));
    let every_model = STRATEGIES.into_iter().map(String::from);
    every_model.chain(uniform).collect()
}

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
    /// Pinned host memory then.
    pub host_pinned_bytes: u64,
    /// The peak then, less the plan's.
    pub difference_bytes: i64,
}

/// Moments and masters in pinned host memory.
const OFFLOADED_STATES: &str = "optimizer states on the host (--offload-optimizer pinned)";

/// Plans every strategy that goes with the specifications of single layers.
pub(super) fn strategies(settings: &Settings, target: Target) -> Result<Vec<Strategy>, Failure> {
    let plan = |(recompute, other): (String, Settings)| {
        let offload_activations = other.policy.offloaded().to_string();
        let Figures {
            peak,
            reserved_bytes,
            recompute_flops_fraction,
            ..
        } = figures(&other, target)?;
        Ok(Strategy {
            recompute,
            offload_activations,
            peak_bytes: peak.bytes,
            reserved_bytes,
            recompute_flops_fraction,
        })
    };
    let others = recompute_specs(settings.model.layers).into_iter();
    let others = others.filter_map(|spec| {
        let other = settings.with_recompute(&spec)?;
        Some((spec, other))
    });
    others.map(plan).collect()
}

/// Plans what grouped heads, the chunked head, attention, accumulation, and formats and place of states change.
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
    // On the CPU device host memory is the device's own.
    if target == Target::Cuda && settings.offload.is_none() {
        change(OFFLOADED_STATES.into(), &|settings| {
            settings.offload = Some(OptimizerOffload::default());
        });
    }
    let plan = |(mut change, other): (String, Settings)| {
        let planned = figures(&other, target)?;
        let peak = planned.peak.bytes;
        if other.offload != settings.offload {
            let pinned = format_bytes(planned.host_pinned_bytes);
            change += &format!(", {pinned} of host memory");
        }
        Ok(Effect {
            change,
            peak_bytes: peak,
            host_pinned_bytes: planned.host_pinned_bytes,
            difference_bytes: peak as i64 - peak_bytes as i64,
        })
    };
    changes.into_iter().map(plan).collect()
}

#[cfg(test)]
mod tests {
    use super::recompute_specs;

    #[test]
    fn chunks_of_blocks_fit_the_number_of_layers() {
        let uniform = |layers| -> Vec<String> {
            let specs = recompute_specs(layers).into_iter();
            let chunks =
                specs.filter_map(|spec| spec.strip_prefix("full:uniform:").map(String::from));
            chunks.collect()
        };
        assert_eq!(uniform(1), [""; 0]);
        assert_eq!(uniform(3), ["2"]);
        assert_eq!(uniform(4), ["2", "4"]);
        assert_eq!(uniform(48), ["2", "4", "7"]);
        assert_eq!(uniform(126), ["2", "4", "12"]);
    }
}
