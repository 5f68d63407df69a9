//! The plan of a run: one training step on shapes.

mod activations;
mod alternatives;
mod arenas;
mod formulas;
mod gpus;
mod notes;
mod offload;
mod table;

pub use activations::PlannedActivation;
pub use alternatives::{Effect, Strategy, recompute_specs};
pub use arenas::PlannedArena;
pub(crate) use arenas::{HOST_ARENAS, arena_table};
pub use formulas::Formula;
pub(crate) use gpus::CUDA_OVERHEAD_BYTES;
pub use offload::PlannedOffload;

use crate::failure::Failure;
use crate::session::Session;
use crate::settings::Settings;
use activations::{TotalBytes, planned_activations, total_bytes};
use data::{MicroBatch, StepBatch};
use kernels::meta::FlopCounter;
use kernels::{Target, Traffic};
use memory::{
    ByCategory, ByPhase, DType, GRANULARITY_BYTES, Layer, LiveLease, Memory, Peak, Phase,
};
use model::{Attention, flops_per_token};
use serde::Serialize;
use std::collections::BTreeMap;

/// What a run will need, to the byte. `plan.json`.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// `cpu` or `cuda`.
    pub device: &'static str,
    /// Compute type.
    pub dtype: &'static str,
    /// How attention is computed.
    pub attention: Attention,
    /// What is worth knowing before the run.
    pub notes: Vec<String>,
    /// Most live device bytes in a step.
    pub peak_bytes: u64,
    /// Live at the peak; sums to `peak_bytes`.
    pub peak_by_category: ByCategory,
    /// What is going on at the peak.
    pub peak_phase: Phase,
    /// The block at work at the peak; none outside the blocks.
    pub peak_layer: Layer,
    /// Most live device bytes in each phase.
    pub phase_peak_bytes: ByPhase<u64>,
    /// Bytes to reserve for the leases of a step.
    pub slab_bytes: u64,
    /// Slab and everything that lives across steps, as the driver will see them.
    pub reserved_bytes: u64,
    /// `reserved_bytes` over `peak_bytes`, less 1: what placement loses.
    pub fragmentation: f64,
    /// Context, modules and libraries beside the plan: an estimate on CUDA.
    pub device_overhead_bytes: u64,
    /// Bytes of pinned host memory.
    pub host_pinned_bytes: u64,
    /// Bytes that a step copies from the host to the device.
    pub h2d_bytes: u64,
    /// Bytes that a step copies from the device to the host.
    pub d2h_bytes: u64,
    /// Leases are rounded up to this.
    pub granularity_bytes: u64,
    /// Everything that lives across steps.
    pub persistent_bytes: u64,
    /// Arenas (weights, gradients, optimizer states) over the number of parameters.
    pub bytes_per_parameter: f64,
    /// These arenas.
    pub arenas: Vec<PlannedArena>,
    /// Arenas in pinned host memory: offloaded states.
    pub host_arenas: Vec<PlannedArena>,
    /// What offload costs; null without it, and for the CPU.
    pub offload: Option<PlannedOffload>,
    /// Number of parameters.
    pub parameters: usize,
    /// Model FLOPs of forward and backward, for one token.
    pub flops_per_token: u64,
    /// FLOPs of replays over those of forward and backward.
    pub recompute_flops_fraction: f64,
    /// Whether what is reserved and the overhead fit a GPU.
    pub fits: BTreeMap<&'static str, bool>,
    /// Other recompute specifications under the same settings, with the offload that goes with them.
    pub strategies: Vec<Strategy>,
    /// What single other settings would change.
    pub effects: Vec<Effect>,
    /// Rules of thumb beside the plan.
    pub formulas: Vec<Formula>,
    /// What is live at the peak, largest first.
    pub largest_at_peak: Vec<LiveLease>,
    /// Every activation of every layer for one micro-batch, with what becomes of it.
    pub activations: Vec<PlannedActivation>,
}

/// The figures of one step on shapes.
pub(crate) struct Figures {
    pub(crate) peak: Peak,
    pub(crate) phase_peaks: ByPhase<u64>,
    pub(crate) slab_bytes: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) host_pinned_bytes: u64,
    pub(crate) traffic: Traffic,
    pub(crate) persistent_bytes: u64,
    pub(crate) recompute_flops_fraction: f64,
    largest_at_peak: Vec<LiveLease>,
    session: Session,
}

/// Makes one step on shapes.
pub(crate) fn figures(settings: &Settings, target: Target) -> Result<Figures, Failure> {
    let (memory, flops) = (Memory::shapes(), FlopCounter::default());
    let mut session = Session::on_shapes(settings.clone(), &memory, target, flops.clone())?;
    let persistent_bytes = memory.live_bytes();
    let outcome = session.step(&shape_of_a_step(settings))?;
    let step = outcome.memory;
    let not_made = settings.accum - MICRO_BATCHES_MAX.min(settings.accum);
    let flops = flops.by_phase();
    Ok(Figures {
        peak: step.peak,
        phase_peaks: step.phase_peaks,
        slab_bytes: step.slab_bytes,
        reserved_bytes: persistent_bytes + step.slab_bytes,
        host_pinned_bytes: step.host_pinned_bytes,
        traffic: outcome
            .traffic
            .plus(outcome.micro_batch_traffic.times(not_made)),
        persistent_bytes,
        recompute_flops_fraction: flops.recompute as f64 / (flops.forward + flops.backward) as f64,
        largest_at_peak: memory.largest_at_peak(),
        session,
    })
}

impl Plan {
    /// Live peak and reserved bytes alone, without alternatives.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn peak_and_reserved_bytes(
        settings: &Settings,
        target: Target,
    ) -> Result<(u64, u64), Failure> {
        let figures = figures(settings, target)?;
        Ok((figures.peak.bytes, figures.reserved_bytes))
    }

    /// Plans a run by making one step of it on shapes.
    ///
    /// # Errors
    /// None but a defect: shapes need no memory.
    pub fn new(settings: &Settings, target: Target) -> Result<Plan, Failure> {
        let plan = Plan::without_alternatives(settings, target)?;
        Ok(Plan {
            strategies: alternatives::strategies(settings, target)?,
            effects: alternatives::effects(settings, target, plan.peak_bytes)?,
            ..plan
        })
    }

    /// The same, but for `strategies` and `effects`, which are plans of their own.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn without_alternatives(settings: &Settings, target: Target) -> Result<Plan, Failure> {
        let figures = figures(settings, target)?;
        let model = figures.session.model();
        let parameters = model.layout().parameters();
        let activations = planned_activations(model, settings);
        let arenas = arenas::planned_arenas(figures.session.arenas(), parameters);
        let host_arenas = arenas::planned_arenas(figures.session.host_arenas(), parameters);
        let flops_per_token = flops_per_token(&settings.model, settings.seq);
        let offloaded = host_arenas.iter().map(|arena| arena.bytes).sum();
        let of_micro_batch = total_bytes(&activations, None).offloaded;
        let offload =
            PlannedOffload::new(settings, target, offloaded, of_micro_batch, flops_per_token)?;
        let mut notes = notes::notes(settings, &activations);
        notes.extend(offload.as_ref().map(PlannedOffload::note));
        let arena_bytes = arenas.iter().map(|arena| arena.bytes).sum::<u64>();
        let Peak {
            bytes: peak_bytes,
            by_category,
            place,
        } = figures.peak;
        Ok(Plan {
            device: target.name(),
            dtype: dtype_name(settings.dtype),
            attention: settings.attention,
            notes,
            peak_bytes,
            peak_by_category: by_category,
            peak_phase: place.phase,
            peak_layer: place.layer,
            phase_peak_bytes: figures.phase_peaks,
            slab_bytes: figures.slab_bytes,
            reserved_bytes: figures.reserved_bytes,
            fragmentation: figures.reserved_bytes as f64 / peak_bytes as f64 - 1.0,
            device_overhead_bytes: gpus::overhead_bytes(target),
            host_pinned_bytes: figures.host_pinned_bytes,
            h2d_bytes: figures.traffic.h2d_bytes,
            d2h_bytes: figures.traffic.d2h_bytes,
            granularity_bytes: GRANULARITY_BYTES,
            persistent_bytes: figures.persistent_bytes,
            bytes_per_parameter: arena_bytes as f64 / parameters as f64,
            arenas,
            host_arenas,
            offload,
            parameters,
            flops_per_token,
            recompute_flops_fraction: figures.recompute_flops_fraction,
            fits: gpus::fits(target, figures.reserved_bytes),
            strategies: Vec::new(),
            effects: Vec::new(),
            formulas: formulas::formulas(settings, parameters, arena_bytes, &activations),
            largest_at_peak: figures.largest_at_peak,
            activations,
        })
    }
}

/// The second micro-batch meets what the first leaves behind; later ones meet the same.
const MICRO_BATCHES_MAX: usize = 2;

/// A step of the right shape, with nothing in it.
fn shape_of_a_step(settings: &Settings) -> StepBatch {
    let (rows, seq) = (settings.micro_batch, settings.seq);
    let micro = MicroBatch {
        input_ids: vec![0; rows * seq],
        targets: vec![0; rows * seq],
        rows,
        seq,
    };
    StepBatch {
        micro: vec![micro; settings.accum.min(MICRO_BATCHES_MAX)],
    }
}

/// The name of a type in settings and files.
pub fn dtype_name(dtype: DType) -> &'static str {
    if dtype == DType::BF16 { "bf16" } else { "f32" }
}
