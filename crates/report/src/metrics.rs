//! `metrics.jsonl`: one JSON object a line, `kind` first. `docs/reference/run-directory.md` names every field.

use crate::process::ProcessRecord;
use crate::process::status_bytes;
use memory::{ByCategory, ByPhase, DeviceMarks, Layer, Phase};
use model::ReplayCounts;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Write};
use std::path::Path;
use std::time::Duration;

/// The form of `metrics.jsonl`. It rises with every new field, and with any change of a
/// field's name, type or meaning (`crates/trainer/schemas/`).
pub const METRICS_SCHEMA_VERSION: u32 = 5;

/// The first line: what runs, and where.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename = "run")]
pub struct RunRecord {
    /// The form of this file.
    pub schema_version: u32,
    /// Version of the trainer.
    pub version: &'static str,
    /// `cpu` or `cuda:N`.
    pub device: String,
    /// Compute type.
    pub dtype: &'static str,
    /// How attention is computed: `eager` or `flash`.
    pub attention: &'static str,
    /// Name of the configuration.
    pub model: String,
    /// Number of parameters.
    pub parameters: usize,
    /// Model FLOPs of forward and backward, for one token.
    pub flops_per_token: u64,
    /// Leases are rounded up to this.
    pub granularity_bytes: u64,
    /// The most host memory outside the ledger: on the CPU the GEMM library's packing buffers, on CUDA the page-locked
    /// buffers through which uploads pass.
    pub untracked_host_bytes_max: u64,
    /// Which algorithms matrix products take, on CUDA: `heuristic`, or the name of a file and a checksum of what the run takes of
    /// it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<String>,
    /// Which of our CUDA kernels compute attention: `sm80`, those for compute capability 8.0 and later; none on the CPU.
    pub attention_kernels: Option<&'static str>,
    /// Which of them compute products of experts: `sm80`, or `sm90`, those for 9.0 alone; none on the CPU and without experts.
    pub experts_kernels: Option<&'static str>,
    /// Why those for 9.0 were given up, if they were.
    pub kernels_given_up: Option<String>,
    /// Whether micro-batches after the first of a step are CUDA graphs, where the driver allows it.
    pub graphs: bool,
    /// Why not, if not.
    pub graphs_off: Option<&'static str>,
    /// Who makes it: tells a run that was killed from one that is going on.
    pub process: ProcessRecord,
}

/// What depends on the clock, and so differs between identical runs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Timing {
    /// Wall-clock time of the step.
    pub step_ms: f64,
    /// The same by phase, each without the phases entered from it.
    pub phase_ms: ByPhase<f64>,
    /// Tokens processed (masked ones too) per second.
    pub tokens_per_s: f64,
    /// How long the step waited for its data.
    pub data_wait_ms: f64,
    /// Model FLOPs per second, in units of 10^12; recompute is not counted.
    pub tflops: f64,
    /// `tflops` over the device's peak; none where that is unknown.
    pub mfu: Option<f64>,
}

impl Timing {
    /// The timing of a step that processed `tokens` tokens.
    pub fn new(
        elapsed: Duration,
        data_wait: Duration,
        phases: &ByPhase<Duration>,
        tokens: usize,
        flops_per_token: u64,
        peak_tflops: Option<f64>,
    ) -> Timing {
        let mut phase_ms = ByPhase::default();
        Phase::ALL
            .iter()
            .for_each(|phase| *phase_ms.get_mut(*phase) = milliseconds(phases.get(*phase)));
        let tokens_per_s = tokens as f64 / elapsed.as_secs_f64();
        let tflops = tokens_per_s * flops_per_token as f64 / 1e12;
        Timing {
            step_ms: milliseconds(elapsed),
            phase_ms,
            tokens_per_s,
            data_wait_ms: milliseconds(data_wait),
            tflops,
            mfu: peak_tflops.map(|peak| tflops / peak),
        }
    }
}

/// A time as records have it, to the microsecond.
pub fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// One step. Outside [`Timing`], identical commands write identical lines.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename = "step")]
pub struct StepRecord {
    /// The step, from 1.
    pub step: usize,
    /// Mean over all targets of the step, or over its pairs.
    pub loss: f32,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f32,
    /// Whether both are finite.
    pub finite: bool,
    /// Learning rate.
    pub lr: f32,
    /// That of the matrices that the optimizer updates as a whole, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_matrices: Option<f32>,
    /// What the routers of a mixture of experts did, if the model has some.
    #[serde(flatten)]
    pub routers: Option<RouterMarks>,
    /// How much of each operand in FP8 underflows, if products are in FP8: where one scale a tensor does not suffice.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fp8_underflows: Vec<UnderflowMarks>,
    /// Rewards of the step's pairs, if the loss is that of preferences.
    #[serde(flatten)]
    pub rewards: Option<RewardMarks>,
    /// The distance from the reference and the clipped share, if a program makes steps on a policy gradient.
    #[serde(flatten)]
    pub policy: Option<PolicyMarks>,
    /// Passes over the data so far, this step included.
    pub epoch: f64,
    /// Targets counted.
    pub tokens: usize,
    /// What depends on the clock.
    #[serde(flatten)]
    pub timing: Timing,
    /// Most live device bytes in this step.
    pub peak_bytes: u64,
    /// What the plan of a step of this shape says: under `--packing pad` micro-batches differ in length.
    pub planned_peak_bytes: u64,
    /// Live at the peak; sums to `peak_bytes`.
    pub peak_by_category: ByCategory,
    /// What was going on at the peak.
    pub peak_phase: Phase,
    /// The block at work at the peak; none outside the blocks.
    pub peak_layer: Layer,
    /// Most live device bytes in each phase.
    pub phase_peak_bytes: ByPhase<u64>,
    /// Bytes reserved for the leases of a step.
    pub slab_bytes: u64,
    /// Bytes of pinned host memory.
    pub host_pinned_bytes: u64,
    /// Replays of each stage.
    pub replayed: ReplayCounts,
    /// Bytes copied from the host to the device.
    pub h2d_bytes: u64,
    /// Bytes copied from the device to the host.
    pub d2h_bytes: u64,
    /// Bytes read from the disk's scratch files.
    pub disk_read_bytes: u64,
    /// Bytes written to them.
    pub disk_written_bytes: u64,
    /// Bytes sent to other ranks, where there are ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent_bytes: Option<u64>,
    /// What the device itself says; on CUDA alone. `device_total_used_bytes` counts other processes too, and so may
    /// differ between identical runs.
    #[serde(flatten)]
    pub device: Option<DeviceMarks>,
}

/// Means over the pairs of a step. A sequence's reward is `dpo.beta` times how much likelier it is than under the reference, in
/// log-probability.
#[derive(Clone, Debug, Serialize)]
pub struct RewardMarks {
    /// The mean reward of chosen sequences.
    pub rewards_chosen: f32,
    /// The mean reward of rejected sequences.
    pub rewards_rejected: f32,
    /// How much larger those of chosen sequences are.
    pub rewards_margin: f32,
    /// The share of pairs whose chosen sequence has the larger one.
    pub rewards_accuracy: f32,
}

/// Means over the targets of a step on a policy gradient.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyMarks {
    /// How far the policy is from the reference: of q, by how much likelier the reference makes a target in log-probability, the mean of
    /// exp(q) - q - 1.
    pub policy_kl: f32,
    /// The share of targets whose ratio of probabilities is clipped.
    pub policy_clip_share: f32,
}

/// What the routers of a mixture of experts did in a step.
#[derive(Clone, Debug, Serialize)]
pub struct RouterMarks {
    /// What their loss of balance adds to the loss, its coefficient included; none if no router has a loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_aux: Option<f32>,
    /// What their loss by the size of logits adds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_z_loss: Option<f32>,
    /// For each layer with experts, the choices of the most chosen expert over their mean. To four decimals.
    pub expert_load_max_over_mean: Vec<f64>,
    /// For each layer with experts, the entropy of choices over that of equally many for each expert. To four decimals.
    pub expert_load_entropy: Vec<f64>,
}

impl RouterMarks {
    /// The largest load of all layers, as a scalar.
    pub(crate) fn largest_load(&self) -> f64 {
        let loads = self.expert_load_max_over_mean.iter().copied();
        loads.fold(0.0, f64::max)
    }

    /// The least entropy of all layers.
    pub(crate) fn least_entropy(&self) -> f64 {
        let entropies = self.expert_load_entropy.iter().copied();
        entropies.fold(1.0, f64::min)
    }
}

/// How much of an operand in FP8 underflowed in a step, over all ranks: it was not zero, and its codes are.
#[derive(Clone, Debug, Serialize)]
pub struct UnderflowMarks {
    /// The layer of a block: qkv, attn_out, mlp_up or mlp_down.
    pub layer: &'static str,
    /// Its input, weight or gradient.
    pub operand: &'static str,
    /// The largest share of all blocks, from 0 to 1. To six decimals.
    pub share: f64,
    /// The first block that has it.
    pub block: usize,
}

/// An evaluation between steps.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename = "eval")]
pub struct EvalRecord {
    /// The step after which it was made.
    pub step: usize,
    /// Mean over all targets.
    pub loss: f64,
    /// e to the loss.
    pub perplexity: f64,
    /// The loss in bits, for each byte of text; none where the data does not say how long its text is.
    pub bits_per_byte: Option<f64>,
    /// Targets counted.
    pub targets: u64,
    /// The lowest loss so far.
    pub is_best: bool,
    /// Most live device bytes.
    pub peak_bytes: u64,
    /// What the plan said.
    pub planned_peak_bytes: u64,
    /// Wall-clock time.
    pub eval_ms: f64,
}

/// A text of the model's own, between steps.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename = "sample")]
pub struct SampleRecord {
    /// The step after which it was made.
    pub step: usize,
    /// What it begins with.
    pub prompt: String,
    /// How the model went on.
    pub text: String,
}

/// A checkpoint was asked for.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename = "checkpoint")]
pub struct CheckpointRecord {
    /// The step whose state it is.
    pub step: usize,
    /// How long training stood still for it; it may be written in the background after that.
    pub stall_ms: f64,
}

/// Where a run goes on.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename = "resume")]
pub struct ResumeRecord {
    /// The form of this line and the following ones.
    pub schema_version: u32,
    /// Steps that the checkpoint holds.
    pub step: usize,
    /// The checkpoint.
    pub from: String,
    /// Settings that changed what is computed, by `--allow-change`.
    pub changes: Vec<String>,
    /// As in the run's first line, from here on.
    pub attention_kernels: Option<&'static str>,
    /// As in the run's first line, from here on.
    pub experts_kernels: Option<&'static str>,
    /// As in the run's first line, from here on.
    pub kernels_given_up: Option<String>,
    /// Who goes on with it.
    pub process: ProcessRecord,
}

/// The last line.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename = "end")]
pub struct EndRecord {
    /// `done`, `interrupted`, `diverged`, `out_of_memory` or `failed`.
    pub reason: &'static str,
    /// Steps made.
    pub steps: usize,
    /// Those of them that were skipped, because loss or gradients were not finite.
    pub skipped_steps: usize,
    /// The process's largest resident set.
    pub max_rss_bytes: Option<u64>,
}

/// Writes records as they come, each line whole.
pub struct MetricsFile {
    file: File,
    /// What is not written yet.
    pending: Vec<u8>,
}

impl MetricsFile {
    /// Starts the file.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn create(path: &Path) -> std::io::Result<MetricsFile> {
        Ok(MetricsFile {
            file: File::create(path)?,
            pending: Vec::new(),
        })
    }

    /// Goes on at the end of a file, which is made where there is none.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn append(path: &Path) -> std::io::Result<MetricsFile> {
        Ok(MetricsFile {
            file: OpenOptions::new().append(true).create(true).open(path)?,
            pending: Vec::new(),
        })
    }

    /// Opens the file of a run that is resumed after `step` steps. Records of later steps are removed, because those steps
    /// are made again.
    ///
    /// # Errors
    /// Those of the file system; the file is then as it was.
    pub fn resume(path: &Path, step: usize) -> std::io::Result<MetricsFile> {
        let shortened = path.with_extension("jsonl.tmp");
        let mut kept = BufWriter::new(File::create(&shortened)?);
        for line in BufReader::new(File::open(path)?).split(b'\n') {
            let line = line?;
            if belongs_before(&line, step) {
                kept.write_all(&line)?;
                kept.write_all(b"\n")?;
            }
        }
        kept.into_inner()?.sync_all()?;
        std::fs::rename(&shortened, path)?;
        MetricsFile::append(path)
    }

    /// Appends a record.
    ///
    /// # Errors
    /// Those of the file system. What could not be written is written before the next record, so that no line is torn.
    pub fn write(&mut self, record: &impl Serialize) -> std::io::Result<()> {
        serde_json::to_writer(&mut self.pending, record)?;
        self.pending.push(b'\n');
        while !self.pending.is_empty() {
            match self.file.write(&self.pending) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.pending.drain(..written)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Whether a line tells of what happened up to a step. One that was cut short does not, nor an end.
fn belongs_before(line: &[u8], step: usize) -> bool {
    let Ok(record) = serde_json::from_slice::<serde_json::Value>(line) else {
        return false;
    };
    let is_later = record["step"].as_u64().is_some_and(|at| at > step as u64);
    record["kind"] != "end" && !is_later
}

/// The largest resident set that this process has had; none where the system does not tell.
pub fn max_rss_bytes() -> Option<u64> {
    own_status_bytes("VmHWM:")
}

/// What is resident of this process but for files that are mapped, whose pages the system takes back when it wants them; none
/// where it does not tell.
pub fn resident_bytes() -> Option<u64> {
    Some(own_status_bytes("RssAnon:")? + own_status_bytes("RssShmem:")?)
}

fn own_status_bytes(name: &str) -> Option<u64> {
    status_bytes(Path::new("/"), "self", name)
}
