//! The effects of other settings, each found by planning it.

use crate::figures::{Figures, quick_figures};
use crate::levers::{Setup, levers, recompute_specs};
use kernels::Target;
use memory::format_bytes;
use rayon::prelude::*;
use serde::Serialize;
use session::Result;

/// A recompute specification with otherwise equal settings.
#[derive(Clone, Debug, Serialize)]
pub struct Strategy {
    /// The specification.
    pub recompute: String,
    /// The labels that it offloads: those of the settings, or `none` if the specification recomputes some of them.
    pub offload_activations: String,
    /// Its peak.
    pub peak_bytes: u64,
    /// Slab and everything that lives across steps.
    pub reserved_bytes: u64,
    /// Extra FLOPs over those of forward and backward.
    pub recompute_flops_fraction: f64,
}

impl Strategy {
    pub(crate) fn offloads(&self) -> bool {
        self.offload_activations != "none"
    }
}

/// The effect of one other setting.
#[derive(Clone, Debug, Serialize)]
pub struct Effect {
    /// What is changed, and to what.
    pub change: String,
    /// The peak with it.
    pub peak_bytes: u64,
    /// Pinned host memory with it.
    pub host_pinned_bytes: u64,
    /// The peak with it, less the plan's.
    pub difference_bytes: i64,
}

/// Plans every recompute specification that goes with the settings.
pub(crate) fn strategies(run: &Setup) -> Result<Vec<Strategy>> {
    let specs = recompute_specs(&run.settings.policy).into_iter();
    let others = specs.filter_map(|spec| Some((run.with(&run.recompute(&spec)?)?, spec)));
    let others: Vec<(Setup, String)> = others.collect();
    let plan = |(other, recompute): (Setup, String)| {
        let Figures {
            peak,
            reserved_bytes,
            recompute_flops_fraction,
            ..
        } = quick_figures(&other.settings, run.target)?;
        Ok(Strategy {
            recompute,
            offload_activations: other.settings.policy.offloaded.to_string(),
            peak_bytes: peak.bytes,
            reserved_bytes,
            recompute_flops_fraction,
        })
    };
    others.into_par_iter().map(plan).collect()
}

/// Plans the effects of single other settings.
pub(crate) fn effects(run: &Setup, peak_bytes: u64) -> Result<Vec<Effect>> {
    let compared = levers(run).filter(|lever| !lever.effect.is_empty());
    let others = compared.filter_map(|lever| Some((run.with(&(lever.pull)(run)?)?, lever.effect)));
    let others: Vec<(Setup, &str)> = others.collect();
    let plan = |(other, effect): (Setup, &str)| {
        let planned = quick_figures(&other.settings, run.target)?;
        let mut change = other.words(effect);
        if other.settings.homes != run.settings.homes {
            let pinned = format_bytes(planned.host_pinned_bytes);
            change += &format!(", {pinned} of host memory");
        }
        if run.target == Target::Cuda && other.config.fp8 != run.config.fp8 {
            let times = run.seconds()? / other.seconds()?;
            change += &format!(", steps {times:.2} times as fast on paper");
        }
        Ok(Effect {
            change,
            peak_bytes: planned.peak.bytes,
            host_pinned_bytes: planned.host_pinned_bytes,
            difference_bytes: planned.peak.bytes as i64 - peak_bytes as i64,
        })
    };
    others.into_par_iter().map(plan).collect()
}
