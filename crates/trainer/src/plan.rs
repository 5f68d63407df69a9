//! The plan of a run: one training step on shapes.

use crate::failure::Failure;
use crate::session::Session;
use crate::settings::Settings;
use data::{MicroBatch, StepBatch};
use kernels::Target;
use memory::{
    ByCategory, ByPhase, DType, GRANULARITY_BYTES, Layer, LiveLease, Memory, Phase, StepMemory,
    format_bytes,
};
use model::{Action, Activation, Label, flops_per_token};
use report::{Align, Table, memory_table};
use serde::Serialize;

/// What a run will need, to the byte. `plan.json`.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// `cpu` or `cuda`.
    pub device: &'static str,
    /// Compute type.
    pub dtype: &'static str,
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
    /// Slab and everything that lives across steps.
    pub reserved_bytes: u64,
    /// Bytes of pinned host memory.
    pub host_pinned_bytes: u64,
    /// Leases are rounded up to this.
    pub granularity_bytes: u64,
    /// Everything that lives across steps.
    pub persistent_bytes: u64,
    /// Arenas (weights, gradients, optimizer states) over the number of parameters.
    pub bytes_per_parameter: f64,
    /// Number of parameters.
    pub parameters: usize,
    /// Model FLOPs of forward and backward, for one token.
    pub flops_per_token: u64,
    /// Every activation of every layer for one micro-batch, with what becomes of it.
    pub activations: Vec<PlannedActivation>,
    /// What is live at the peak, largest first.
    pub largest_at_peak: Vec<LiveLease>,
}

/// One activation of one layer.
#[derive(Clone, Debug, Serialize)]
pub struct PlannedActivation {
    /// The block.
    pub layer: usize,
    /// The policy's name for its group.
    pub label: &'static str,
    /// Its name.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its type.
    pub dtype: &'static str,
    /// Its leased bytes.
    pub bytes: u64,
    /// What the policy does with it.
    pub action: Action,
}

impl Plan {
    /// Plans a run by making one step of it on shapes.
    ///
    /// # Errors
    /// None but a defect: shapes need no memory.
    pub fn new(settings: &Settings, target: Target) -> Result<Plan, Failure> {
        let memory = Memory::shapes();
        let mut session = Session::on_shapes(settings.clone(), &memory, target)?;
        let persistent_bytes = memory.live_bytes();
        let outcome = session.step(&shape_of_a_step(settings))?;
        let StepMemory {
            peak,
            phase_peaks,
            slab_bytes,
            host_pinned_bytes,
            ..
        } = outcome.memory;
        let parameters = session.model().layout().parameters();
        Ok(Plan {
            device: target.name(),
            dtype: dtype_name(settings.dtype),
            peak_bytes: peak.bytes,
            peak_by_category: peak.by_category,
            peak_phase: peak.place.phase,
            peak_layer: peak.place.layer,
            phase_peak_bytes: phase_peaks,
            slab_bytes,
            reserved_bytes: persistent_bytes + slab_bytes,
            host_pinned_bytes,
            granularity_bytes: GRANULARITY_BYTES,
            persistent_bytes,
            bytes_per_parameter: session.arena_bytes() as f64 / parameters as f64,
            parameters,
            flops_per_token: flops_per_token(&settings.model, settings.seq),
            activations: planned_activations(&session, settings),
            largest_at_peak: memory.largest_at_peak(),
        })
    }

    /// Bytes of one micro-batch's activations of a label, over all layers: all of them, and those kept.
    fn label_bytes(&self, label: Label) -> (u64, u64) {
        let of_label = self
            .activations
            .iter()
            .filter(|activation| activation.label == label.name());
        of_label.fold((0, 0), |(all, kept), activation| {
            let is_kept = activation.action == Action::Keep;
            (
                all + activation.bytes,
                kept + if is_kept { activation.bytes } else { 0 },
            )
        })
    }
}

/// A step of the right shape, with nothing in it.
fn shape_of_a_step(settings: &Settings) -> StepBatch {
    let (rows, seq) = (settings.micro_batch, settings.seq);
    let micro = MicroBatch {
        input_ids: vec![0; rows * seq],
        targets: vec![0; rows * seq],
        rows,
        seq,
    };
    // The second micro-batch meets what the first leaves behind; later ones meet the same.
    StepBatch {
        micro: vec![micro; settings.accum.min(2)],
    }
}

fn planned_activations(session: &Session, settings: &Settings) -> Vec<PlannedActivation> {
    let model = session.model();
    let per_layer = |layer| {
        let present = Activation::ALL
            .into_iter()
            .filter(|activation| model.has(*activation));
        present.map(move |activation| {
            let (shape, dtype) =
                model.activation_shape(activation, settings.micro_batch, settings.seq);
            let bytes = shape.iter().product::<usize>() * dtype.size_in_bytes();
            PlannedActivation {
                layer,
                label: activation.label().name(),
                name: activation.name(),
                shape,
                dtype: dtype_name(dtype),
                bytes: memory::round_up(bytes as u64),
                action: settings.policy.action(layer, activation),
            }
        })
    };
    (0..model.config().layers).flat_map(per_layer).collect()
}

/// The name of a type in settings and files.
pub fn dtype_name(dtype: DType) -> &'static str {
    if dtype == DType::BF16 { "bf16" } else { "f32" }
}

/// How many of the largest leases the table lists.
const LARGEST: usize = 8;

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "plan for {} in {}: {} parameters",
            self.device, self.dtype, self.parameters
        )?;
        writeln!(
            f,
            "peak {} ({} bytes) at {}, {}; reserved {} of which slab {}; {:.2} bytes a parameter live across steps",
            format_bytes(self.peak_bytes),
            self.peak_bytes,
            self.peak_layer,
            self.peak_phase.name(),
            format_bytes(self.reserved_bytes),
            format_bytes(self.slab_bytes),
            self.bytes_per_parameter,
        )?;
        writeln!(f)?;
        writeln!(
            f,
            "{}",
            memory_table((&self.peak_by_category, &self.phase_peak_bytes), None)
        )?;
        let mut labels = Table::new(&[
            ("activations", Align::Left),
            ("of one micro-batch", Align::Right),
            ("kept", Align::Right),
        ]);
        for label in Label::ALL {
            let (all, kept) = self.label_bytes(label);
            labels.row([
                label.name().to_string(),
                format_bytes(all),
                format_bytes(kept),
            ]);
        }
        writeln!(f, "{labels}")?;
        let mut largest = Table::new(&[
            ("largest at the peak", Align::Left),
            ("", Align::Left),
            ("bytes", Align::Right),
        ]);
        for lease in self.largest_at_peak.iter().take(LARGEST) {
            let place = lease
                .layer
                .block()
                .map_or(String::new(), |block| format!("block {block}"));
            largest.row([lease.name.to_string(), place, format_bytes(lease.bytes)]);
        }
        write!(f, "{largest}")
    }
}
