//! What the ranks of a run divide, and what they send each other.

use crate::change::set;
use crate::figures::quick_figures;
use crate::gpus::NcclMemory;
use crate::levers::Setup;
use crate::on_paper::{Paper, StepOnPaper};
use crate::pipeline::{self, PlannedPipelineStage};
use kernels::Target;
use memory::format_bytes;
use report::Align::{Left, Right};
use report::Table;
use serde::Serialize;
use session::Result;
use settings::Settings;
use units::Zero;

/// The rank that a plan is made for, and the effect of each stage of ZeRO.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedRanks {
    /// How many there are.
    pub ranks: usize,
    /// The rank of this plan.
    pub rank: usize,
    /// What they divide.
    pub zero: Zero,
    /// How many neighbours have all weights together; null: all ranks, or each of them.
    pub shard_group: Option<usize>,
    /// How many of them share each sequence.
    pub context: usize,
    /// Equal parts of each sequence.
    pub context_parts: usize,
    /// Stages of the pipeline.
    pub pipeline: usize,
    /// Tokens of a step of all ranks together.
    pub tokens_a_step: usize,
    /// Bytes that this rank sends to other ranks in a step.
    pub sent_bytes: u64,
    /// What NCCL holds of each GPU, a part of `device_overhead_bytes`; null for the CPU.
    pub nccl: Option<NcclMemory>,
    /// The stages that go with the other settings, this one included. Empty in the plan of a run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<PlannedZero>,
    /// The stages of the pipeline, where the model is divided among some. Empty in the plan of a run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pipeline_stages: Vec<PlannedPipelineStage>,
}

/// A stage of ZeRO under the same settings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedZero {
    /// Its number.
    pub zero: Zero,
    /// Bytes that live across steps.
    pub persistent_bytes: u64,
    /// Bytes that a step adds to them at its peak.
    pub transient_bytes: u64,
    /// The sum of both.
    pub peak_bytes: u64,
    /// Slab and everything that lives across steps.
    pub reserved_bytes: u64,
    /// Pinned host memory.
    pub host_pinned_bytes: u64,
    /// Bytes that this rank sends to other ranks in a step.
    pub sent_bytes: u64,
    /// How long a step takes; null if the link's rate is not known.
    pub time: Option<StepTime>,
}

/// The time of a step on paper, at assumed or measured rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepTime {
    /// The rate at which a rank sends, and also that at which it receives, in units of 10^9 bytes a second.
    pub link_gbps: f64,
    /// A step if sending and copying took no time.
    pub compute_ms: f64,
    /// The time that sending and copying add to it.
    pub exposed_ms: f64,
    /// Tokens of all ranks a second, including that time.
    pub tokens_per_s: f64,
}

impl PlannedRanks {
    /// The ranks of the settings, with what a step on shapes sent; none without ranks.
    pub(crate) fn new(
        settings: &Settings,
        target: Target,
        sent_bytes: u64,
    ) -> Option<PlannedRanks> {
        let ranks = settings.ranks.as_ref()?;
        Some(PlannedRanks {
            ranks: ranks.of_all().of,
            rank: ranks.of_all().number,
            pipeline: ranks.stage.of,
            zero: ranks.zero,
            shard_group: ranks.shard_group,
            context: ranks.sharing,
            context_parts: settings.own_parts().of,
            tokens_a_step: settings.tokens_a_step(),
            sent_bytes,
            nccl: NcclMemory::of(settings)
                .filter(|_| target == Target::Cuda && ranks.of_all().of > 1),
            stages: Vec::new(),
            pipeline_stages: Vec::new(),
        })
    }

    /// Adds every stage of ZeRO that goes with the other settings, and every stage of the pipeline.
    pub(crate) fn with_stages(self, run: &Setup) -> Result<PlannedRanks> {
        let planned = Zero::ALL.into_iter().filter_map(|zero| {
            let other = run.with(&set!(collectives.zero = Some(zero), zero.stage()))?;
            Some(PlannedZero::new(&other.settings, run.target, zero))
        });
        let stages = planned.collect::<Result<_>>()?;
        let mut pipeline_stages = PlannedPipelineStage::all(&run.settings, run.target)?;
        if !pipeline_stages.is_empty() && StepTime::is_known(&run.settings, run.target) {
            let paper = Paper::at_rates(&run.settings, run.target);
            let times = paper.pipeline(&run.settings)?;
            PlannedPipelineStage::set_times(&mut pipeline_stages, &times);
        }
        Ok(PlannedRanks {
            stages,
            pipeline_stages,
            ..self
        })
    }

    /// A line about the rank, for the head of its plan.
    pub(crate) fn headline(&self) -> String {
        let stage = self.zero.stage();
        let sent = format_bytes(self.sent_bytes);
        let of_stage = self.ranks / self.pipeline;
        let stages = match self.pipeline {
            1 => String::new(),
            stages => format!(" --pp {stages} (stage {})", self.rank / of_stage),
        };
        let (context, parts) = (self.context, self.context_parts);
        let group = format!(
            "of the sequences of group {} of {}",
            self.rank % of_stage / context,
            of_stage / context
        );
        let (part, each) = (self.rank % context, parts / context);
        let parts = match (parts, each) {
            (1, _) => String::new(),
            (_, 1) => format!(" --cp {context} (part {part} {group})"),
            _ => format!(
                " --cp {context} --context-parts {parts} (parts {} to {} {group})",
                part * each,
                (part + 1) * each - 1
            ),
        };
        let groups = self.shard_group.map_or(String::new(), |of| {
            format!(
                " --shard-group {of} (group {} of {})",
                self.rank % of_stage / of,
                of_stage / of
            )
        });
        let place = stages + &parts + &groups;
        format!(
            "rank {} of {} under --zero {stage}{place}: a step of all has {} tokens, and this rank sends {sent} ({} bytes)",
            self.rank, self.ranks, self.tokens_a_step, self.sent_bytes
        )
    }

    /// The stages as a table.
    #[rustfmt::skip]
    pub(crate) fn table(&self) -> Table {
        let is_this = |stage: &PlannedZero| if stage.zero == self.zero { " *" } else { "" };
        let timed = |stage: &PlannedZero, words: fn(StepTime) -> String| {
            stage.time.map_or_else(String::new, words)
        };
        let table = Table::of_items(&self.stages, &[
            ("--zero", Left, &|stage| stage.zero.stage().to_string() + is_this(stage)),
            ("across steps", Right, &|stage| format_bytes(stage.persistent_bytes)),
            ("a step adds", Right, &|stage| format_bytes(stage.transient_bytes)),
            ("peak", Right, &|stage| format_bytes(stage.peak_bytes)),
            ("sent a step", Right, &|stage| format_bytes(stage.sent_bytes)),
            ("not hidden", Right, &|stage| {
                timed(stage, |time| {
                    let share = 100.0 * time.exposed_ms / time.compute_ms;
                    format!("{:.1} ms ({share:.0} %)", time.exposed_ms)
                })
            }),
            ("tokens/s of all", Right, &|stage| timed(stage, |time| format!("{:.0}", time.tokens_per_s))),
        ]);
        table.without_empty_columns()
    }

    /// Explains the figures to the reader.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.ranks > 1 {
            notes.push(format!(
                "bytes are those of rank {}, of device, host and disk alike; ranks of one machine share its host memory and its \
                 disks, which have to hold those of each",
                self.rank
            ));
        }
        let of_this = self.stages.iter().find(|stage| stage.zero == self.zero);
        let time = of_this.and_then(|stage| stage.time);
        let is_pipeline = !self.pipeline_stages.is_empty();
        notes.extend(
            time.filter(|_| is_pipeline)
                .map(|time| self.pipeline_note(time)),
        );
        notes.extend(time.map(|time| {
            format!(
                "times under each --zero are on paper, at {} GB/s that a rank sends and as much that it receives, and NVLink's rate between \
                 ranks of a machine that share sequences or weights (hardware.link_gbps replaces both)",
                time.link_gbps
            )
        }));
        notes
    }
}

impl PlannedRanks {
    /// The stages of the pipeline as a table.
    pub(crate) fn pipeline_table(&self) -> Table {
        pipeline::table(&self.pipeline_stages)
    }

    fn pipeline_note(&self, time: StepTime) -> String {
        let idle = self.pipeline_stages.iter();
        let idle = idle.filter_map(|stage| stage.idle_fraction);
        let (least, most) = idle.fold((1.0_f64, 0.0_f64), |(least, most), share| {
            (least.min(share), most.max(share))
        });
        format!(
            "a step of all {} stages takes {:.1} ms on paper ({:.0} tokens/s of all); a stage computes nothing in {:.0} to {:.0} % of \
             it, while it waits for other stages or for copies; more micro-batches a step (--accum) shorten the wait",
            self.pipeline,
            time.compute_ms + time.exposed_ms,
            time.tokens_per_s,
            100.0 * least,
            100.0 * most
        )
    }
}

impl PlannedZero {
    fn new(settings: &Settings, target: Target, zero: Zero) -> Result<PlannedZero> {
        let planned = quick_figures(settings, target)?;
        let (peak_bytes, persistent_bytes) = (planned.most_bytes(), planned.persistent_bytes);
        Ok(PlannedZero {
            zero,
            persistent_bytes,
            transient_bytes: peak_bytes - persistent_bytes,
            peak_bytes,
            reserved_bytes: planned.reserved_bytes,
            host_pinned_bytes: planned.host_pinned_bytes,
            sent_bytes: planned.crossed()?.total().sent_bytes,
            time: StepTime::new(settings, target)?,
        })
    }
}

impl StepTime {
    /// None on the CPU without a given rate: nobody has measured ranks that share a processor's memory.
    pub(crate) fn new(settings: &Settings, target: Target) -> Result<Option<StepTime>> {
        if !StepTime::is_known(settings, target) {
            return Ok(None);
        }
        let paper = Paper::at_rates(settings, target);
        let step = paper.whole(settings)?;
        Ok(Some(StepTime::of(settings, &paper, step)))
    }

    pub(crate) fn is_known(settings: &Settings, target: Target) -> bool {
        target == Target::Cuda || settings.hardware.link_gbps.is_some()
    }

    pub(crate) fn of(settings: &Settings, paper: &Paper, step: StepOnPaper) -> StepTime {
        StepTime {
            link_gbps: paper.rates.link / 1e9,
            compute_ms: 1e3 * step.computing,
            exposed_ms: 1e3 * (step.seconds - step.computing).max(0.0),
            tokens_per_s: settings.tokens_a_step() as f64 / step.seconds,
        }
    }
}
