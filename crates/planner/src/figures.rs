//! The figures of one step on shapes.

use kernels::Target;
use kernels::meta::FlopCounter;
use memory::{ByPhase, LiveLease, Memory, Peak};
use session::{Crossed, MICRO_BATCHES_MAX, PeaksBetween, Session, SessionError, shape_of_a_step};
use settings::Settings;

/// What one step on shapes needs.
pub(crate) struct Figures {
    pub(crate) peak: Peak,
    pub(crate) phase_peaks: ByPhase<u64>,
    pub(crate) slab_bytes: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) host_pinned_bytes: u64,
    pub(crate) crossed: Crossed,
    pub(crate) persistent_bytes: u64,
    pub(crate) recompute_flops_fraction: f64,
    pub(crate) largest_at_peak: Vec<LiveLease>,
    pub(crate) between: PeaksBetween,
    pub(crate) session: Session,
}

impl Figures {
    /// Most live device bytes, between steps too: what a limit must hold.
    pub(crate) fn most_bytes(&self) -> u64 {
        self.between.most(self.peak.bytes)
    }
}

/// Makes one step on shapes.
pub(crate) fn figures(settings: &Settings, target: Target) -> Result<Figures, SessionError> {
    let (memory, flops) = (Memory::shapes(), FlopCounter::default());
    let mut session = Session::on_shapes(settings.clone(), &memory, target, flops.clone())?;
    let persistent_bytes = memory.live_bytes();
    let outcome = session.step(&shape_of_a_step(settings, settings.seq))?;
    let step = outcome.memory;
    let not_made = settings.accum - MICRO_BATCHES_MAX.min(settings.accum);
    let (flops, largest_at_peak) = (flops.by_phase(), memory.largest_at_peak());
    let between = session.between_steps_on_shapes()?;
    let slab_bytes = memory.step_memory().slab_bytes;
    Ok(Figures {
        peak: step.peak,
        phase_peaks: step.phase_peaks,
        slab_bytes,
        reserved_bytes: persistent_bytes + slab_bytes,
        host_pinned_bytes: step.host_pinned_bytes,
        crossed: outcome.crossed.plus(times(outcome.micro_batch, not_made)),
        persistent_bytes,
        recompute_flops_fraction: flops.recompute as f64 / (flops.forward + flops.backward) as f64,
        largest_at_peak,
        between,
        session,
    })
}

/// What crosses for so many micro-batches.
fn times(one: Crossed, count: usize) -> Crossed {
    Crossed {
        weights: one.weights.times(count),
        gradients: one.gradients.times(count),
        update: one.update.times(count),
        passes: one.passes.times(count),
    }
}
