//! The plan of a run: one training step on shapes.

use crate::activations::{PlannedActivation, planned_activations, total_bytes};
use crate::advice::Advice;
use crate::alternatives::{Effect, Strategy, effects, strategies};
use crate::arenas::{PlannedArena, planned_arenas};
use crate::auto::Frontier;
use crate::copies::PlannedOffload;
use crate::figures::figures;
use crate::formulas::{Formula, anatomies};
use crate::freeze::PlannedFreeze;
use crate::host_phases::HostPhases;
use crate::korthikanti::korthikanti;
use crate::largest::Largest;
use crate::layouts::Layouts;
use crate::levers::Setup;
use crate::on_paper::Paper;
use crate::operations::PlannedOperations;
use crate::ranks::PlannedRanks;
use crate::{gpus, notes, rates};
use kernels::Target;
use memory::{ByCategory, ByPhase, GRANULARITY_BYTES, Layer, LiveLease, Peak, Phase};
use model::{Attention, Labels};
use serde::Serialize;
use session::{PeaksBetween, Result};
use settings::{Config, Settings};
use std::collections::BTreeMap;

/// The form of `plan.json`. It rises with every new field, and with any change of a
/// field's name, type or meaning (`crates/trainer/schemas/`).
const SCHEMA_VERSION: u32 = 12;

/// What a run will need, to the byte. `plan.json`.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The form of this file.
    pub schema_version: u32,
    /// `cpu` or `cuda`.
    pub device: &'static str,
    /// Compute type.
    pub dtype: &'static str,
    /// How attention is computed.
    pub attention: Attention,
    /// Tokens in a chunk of the output head.
    pub head_chunk: usize,
    /// Which algorithms matrix products take: `heuristic`, or the name of a file and a checksum of what the run takes of it.
    /// Only the plan of a run knows, on CUDA.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<String>,
    /// Whether micro-batches after the first of a step are CUDA graphs, where the driver allows it.
    pub graphs: bool,
    /// Why not, if not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub graphs_off: Option<&'static str>,
    /// What is worth knowing before the run.
    pub notes: Vec<String>,
    /// Most live device bytes in a step.
    pub peak_bytes: u64,
    /// Live at the peak; sums to `peak_bytes`.
    pub peak_by_category: ByCategory,
    /// Most live device bytes of an evaluation between steps, where there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_peak_bytes: Option<u64>,
    /// Most live device bytes of a sample of text between steps, where there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample_peak_bytes: Option<u64>,
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
    /// `reserved_bytes` over the largest of the peaks, less 1: what placement loses.
    pub fragmentation: f64,
    /// Context, modules and libraries beside the plan: an estimate on CUDA.
    pub device_overhead_bytes: u64,
    /// Bytes of pinned host memory.
    pub host_pinned_bytes: u64,
    /// Most host memory while files are read or written.
    pub host_phase_bytes: HostPhases,
    /// Bytes of scratch files on the disk.
    pub disk_bytes: u64,
    /// Bytes of a checkpoint's files of tensors, small files apart; of several ranks, of the file that this one writes.
    pub checkpoint_bytes: u64,
    /// Bytes of the trained model's files of weights in Hugging Face layout.
    pub model_bytes: u64,
    /// Bytes that a step copies from the host to the device.
    pub h2d_bytes: u64,
    /// Bytes that a step copies from the device to the host.
    pub d2h_bytes: u64,
    /// Bytes that a step reads from the disk.
    pub disk_read_bytes: u64,
    /// Bytes that a step writes to the disk.
    pub disk_written_bytes: u64,
    /// Which rank's plan it is, and what they send each other, where there are ranks.
    #[serde(flatten)]
    pub ranks: Option<PlannedRanks>,
    /// Leases are rounded up to this.
    pub granularity_bytes: u64,
    /// Everything that lives across steps.
    pub persistent_bytes: u64,
    /// Arenas (weights, gradients, optimizer states) over the number of parameters.
    pub bytes_per_parameter: f64,
    /// These arenas.
    pub arenas: Vec<PlannedArena>,
    /// Arenas in pinned host memory: what is offloaded, and what waits there to be written or sent.
    pub host_arenas: Vec<PlannedArena>,
    /// What offload costs; null without it, and for the CPU.
    pub offload: Option<PlannedOffload>,
    /// Number of parameters.
    pub parameters: usize,
    /// Those that a token uses; absent where that is all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_parameters: Option<usize>,
    /// What freezing some of them saves; absent where all are trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub freeze: Option<PlannedFreeze>,
    /// Model FLOPs of forward and backward, for one token.
    pub flops_per_token: u64,
    /// FLOPs of replays over those of forward and backward.
    pub recompute_flops_fraction: f64,
    /// Whether what is reserved and the overhead fit a GPU.
    pub fits: BTreeMap<&'static str, bool>,
    /// Other recompute specifications under the same settings, with the offload that goes with them; none in the plan of a run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub strategies: Vec<Strategy>,
    /// The effect of single other settings; none in the plan of a run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub effects: Vec<Effect>,
    /// Bytes that operations read and write, and their times on paper, by group. Empty in the plan of a run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operations: Vec<PlannedOperations>,
    /// Rules of thumb beside the plan.
    pub formulas: Vec<Formula>,
    /// What is live at the peak, largest first.
    pub largest_at_peak: Vec<LiveLease>,
    /// What policies call activations.
    #[serde(skip)]
    pub labels: Labels,
    /// Every activation of every layer for one micro-batch, with what becomes of it.
    pub activations: Vec<PlannedActivation>,
    /// What another program keeps of the device's memory, where that was said: answers leave it free.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beside_bytes: Option<u64>,
    /// What would make the run fit, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<Advice>,
    /// Layouts of the ranks that fit a device, where those were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layouts: Option<Layouts>,
    /// The largest micro-batch, sequence or rank, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest: Option<Largest>,
    /// What automatic recompute chooses for budgets, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pareto: Option<Frontier>,
}

impl Plan {
    /// Most host memory beside leases while files are read or written.
    pub fn host_beside_bytes(&self) -> u64 {
        self.host_phase_bytes.beside_bytes
    }

    /// Plans a run, and what other settings would change.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn with_alternatives(config: &Config, target: Target) -> Result<Plan> {
        let run = Setup::new(config.clone(), target)?;
        let settings = Settings::new(config)?;
        let mut plan = Plan::new(&settings, target)?;
        let peak_bytes = match run.config.rank == config.rank {
            true => plan.peak_bytes,
            false => figures(&run.settings, target)?.peak.bytes,
        };
        plan.notes.extend(notes::of_fullest_rank(&settings));
        let ranks = plan.ranks.take();
        let ranks = ranks.map(|ranks| ranks.with_stages(&run));
        plan.notes.extend(rates::note(&run.settings, target));
        Ok(Plan {
            ranks: ranks.transpose()?,
            strategies: strategies(&run)?,
            effects: effects(&run, peak_bytes)?,
            operations: Paper::at_rates(&run.settings, target).operations(&run.settings)?,
            ..plan
        })
    }

    /// Most live device bytes of a step, and of what is computed between steps: what a limit must hold.
    pub fn most_bytes(&self) -> u64 {
        let between = PeaksBetween {
            evaluation: self.eval_peak_bytes,
            sample: self.sample_peak_bytes,
        };
        between.most(self.peak_bytes)
    }

    /// Plans a run by making one step of it on shapes; without `strategies`, `effects` and `operations`, which take steps of their own.
    ///
    /// # Errors
    /// [`SessionError::Config`](session::SessionError::Config) for settings that make no session; else none but a defect: shapes need no memory.
    pub fn new(settings: &Settings, target: Target) -> Result<Plan> {
        let mut figures = figures(settings, target)?;
        figures.session.finish_step()?;
        let saved = figures.session.saved_bytes();
        let model = figures.session.model();
        let parameters = model.layout().parameters();
        let active_parameters = model.architecture().active_parameters();
        let activations = planned_activations(model.architecture(), settings);
        let arenas = planned_arenas(figures.session.arenas(), parameters);
        let host_arenas = planned_arenas(figures.session.host_arenas(), parameters);
        let flops_per_token = model.architecture().flops_per_token(settings.seq);
        let forward_flops = model.architecture().forward_flops_per_token(settings.seq);
        let of_micro_batch = total_bytes(&activations, None).offloaded;
        let crossed = figures.crossed()?;
        let traffic = crossed.total();
        let offload =
            PlannedOffload::new(settings, target, crossed, of_micro_batch, forward_flops)?;
        let mut notes = notes::notes(settings, &activations);
        let note = |planned: &PlannedOffload| planned.note(&settings.homes, traffic);
        notes.extend(offload.as_ref().map(note));
        let freeze = PlannedFreeze::new(settings, target, &figures.session)?;
        notes.extend(freeze.as_ref().map(|freeze| freeze.note(parameters)));
        let arena_bytes = arenas.iter().map(|arena| arena.bytes).sum::<u64>();
        let Peak {
            bytes: peak_bytes,
            by_category,
            place,
        } = figures.peak;
        let most_bytes = figures.most_bytes();
        let ranks = PlannedRanks::new(settings, target, traffic.sent_bytes);
        let graphs_off = match target {
            Target::Cuda => settings.graphs_off,
            Target::Cpu => Some("the CPU has none"),
        };
        Ok(Plan {
            schema_version: SCHEMA_VERSION,
            device: target.name(),
            dtype: settings.dtype.as_str(),
            attention: settings.attention,
            head_chunk: settings.head_chunk,
            algorithms: None,
            graphs: graphs_off.is_none(),
            graphs_off,
            notes,
            peak_bytes,
            peak_by_category: by_category,
            eval_peak_bytes: figures.between.evaluation,
            sample_peak_bytes: figures.between.sample,
            peak_phase: place.phase,
            peak_layer: place.layer,
            phase_peak_bytes: figures.phase_peaks,
            slab_bytes: figures.slab_bytes,
            reserved_bytes: figures.reserved_bytes,
            fragmentation: figures.reserved_bytes as f64 / most_bytes as f64 - 1.0,
            device_overhead_bytes: gpus::overhead_bytes(target, settings),
            host_pinned_bytes: figures.host_pinned_bytes,
            host_phase_bytes: HostPhases::new(settings, &figures, target),
            disk_bytes: figures.session.disk_bytes().unwrap_or(0),
            checkpoint_bytes: saved.checkpoint,
            model_bytes: saved.model,
            h2d_bytes: traffic.h2d_bytes,
            d2h_bytes: traffic.d2h_bytes,
            disk_read_bytes: traffic.disk_read_bytes,
            disk_written_bytes: traffic.disk_written_bytes,
            ranks,
            granularity_bytes: GRANULARITY_BYTES,
            persistent_bytes: figures.persistent_bytes,
            bytes_per_parameter: arena_bytes as f64 / parameters as f64,
            arenas,
            host_arenas,
            offload,
            parameters,
            active_parameters: (active_parameters < parameters).then_some(active_parameters),
            freeze,
            flops_per_token,
            recompute_flops_fraction: figures.recompute_flops_fraction,
            fits: gpus::fits(target, settings, figures.reserved_bytes),
            strategies: Vec::new(),
            effects: Vec::new(),
            operations: Vec::new(),
            formulas: match settings.pipeline {
                None => anatomies(settings, parameters, arena_bytes)
                    .into_iter()
                    .chain(korthikanti(settings, &activations))
                    .collect(),
                // They are about whole models.
                Some(_) => Vec::new(),
            },
            largest_at_peak: figures.largest_at_peak,
            labels: settings.policy.labels,
            activations,
            beside_bytes: None,
            advice: None,
            layouts: None,
            largest: None,
            pareto: None,
        })
    }
}
