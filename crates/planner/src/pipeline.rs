//! What each stage of a pipeline needs: one rank of every stage is planned.

use crate::figures::figures;
use crate::on_paper::StepOnPaper;
use kernels::Target;
use memory::format_bytes;
use model::HeldBlocks;
use rayon::prelude::*;
use report::Align::{Left, Right};
use report::Table;
use serde::Serialize;
use session::Result;
use settings::Settings;

/// A stage of the pipeline, as its rank with the place of this plan's rank needs it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedPipelineStage {
    /// Its number.
    pub stage: usize,
    /// Its virtual stages: one, unless stages are interleaved. The first stage has the embedding besides, and the last the head.
    pub virtual_stages: Vec<PlannedVirtualStage>,
    /// Bytes that live across steps.
    pub persistent_bytes: u64,
    /// Bytes that a step adds to them at its peak.
    pub transient_bytes: u64,
    /// The sum of both.
    pub peak_bytes: u64,
    /// Slab and everything that lives across steps.
    pub reserved_bytes: u64,
    /// The same with what context and libraries take: what the device has to hold.
    pub needs_bytes: u64,
    /// Pinned host memory.
    pub host_pinned_bytes: u64,
    /// Bytes of scratch files on the disk.
    pub disk_bytes: u64,
    /// Bytes that the rank sends to other ranks in a step.
    pub sent_bytes: u64,
    /// The share of a step on paper in which it computes nothing: it waits for other stages, or for copies. Null if times are not
    /// known.
    pub idle_fraction: Option<f64>,
}

/// A run of neighbouring blocks of a stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedVirtualStage {
    /// Its first block.
    pub first_block: usize,
    /// How many blocks it has.
    pub blocks: usize,
    /// How many micro-batches are between their forward and backward passes through it at most.
    pub micro_batches_under_way: usize,
}

impl PlannedVirtualStage {
    fn new(held: HeldBlocks) -> PlannedVirtualStage {
        PlannedVirtualStage {
            first_block: held.layers.start,
            blocks: held.layers.len(),
            micro_batches_under_way: held.micro_batches,
        }
    }
}

impl PlannedPipelineStage {
    /// All stages of the pipeline; none without one.
    ///
    /// # Errors
    /// As [`crate::Plan::new`].
    pub(crate) fn all(settings: &Settings, target: Target) -> Result<Vec<PlannedPipelineStage>> {
        let Some(pipeline) = &settings.pipeline else {
            return Ok(Vec::new());
        };
        let stages = (0..pipeline.stages).into_par_iter();
        let planned = stages.map(|stage| PlannedPipelineStage::new(settings, target, stage));
        planned.collect()
    }

    fn new(settings: &Settings, target: Target, stage: usize) -> Result<PlannedPipelineStage> {
        let settings = settings.in_stage(stage);
        let planned = figures(&settings, target)?;
        let held = settings.held(settings.model.layers);
        let (needs, persistent_bytes) = (planned.needs(), planned.persistent_bytes);
        Ok(PlannedPipelineStage {
            stage,
            virtual_stages: held.into_iter().map(PlannedVirtualStage::new).collect(),
            persistent_bytes,
            transient_bytes: needs.peak_bytes - persistent_bytes,
            peak_bytes: needs.peak_bytes,
            reserved_bytes: needs.reserved_bytes,
            needs_bytes: needs.device_bytes,
            host_pinned_bytes: needs.host_pinned_bytes,
            disk_bytes: needs.disk_bytes,
            sent_bytes: planned.crossed()?.total().sent_bytes,
            idle_fraction: None,
        })
    }

    /// Sets what a step on paper says of the stages' time.
    pub(crate) fn set_times(stages: &mut [PlannedPipelineStage], times: &[StepOnPaper]) {
        let step = times.iter().map(|stage| stage.seconds).fold(0.0, f64::max);
        for (stage, time) in stages.iter_mut().zip(times) {
            stage.idle_fraction = Some(1.0 - time.working / step);
        }
    }
}

/// The stages as a table, in which the largest is marked.
#[rustfmt::skip]
pub(crate) fn table(stages: &[PlannedPipelineStage]) -> Table {
    let has_disk = stages.iter().any(|stage| stage.disk_bytes > 0);
    let largest = stages.iter().max_by_key(|stage| stage.needs_bytes);
    let mark = |stage: &PlannedPipelineStage| if largest == Some(stage) { " (largest)" } else { "" };
    let of_each = |stage: &PlannedPipelineStage, words: fn(&PlannedVirtualStage) -> String| {
        let words: Vec<String> = stage.virtual_stages.iter().map(words).collect();
        words.join(", ")
    };
    let idle = |stage: &PlannedPipelineStage| {
        let share = stage.idle_fraction;
        share.map_or_else(String::new, |share| format!("{:.0} %", 100.0 * share))
    };
    let table = Table::of_items(stages, &[
        ("stage", Left, &|stage| stage.stage.to_string() + mark(stage)),
        ("blocks", Right, &|stage| {
            of_each(stage, |one| match one.first_block + one.blocks - 1 {
                last if last == one.first_block => last.to_string(),
                last => format!("{}-{last}", one.first_block),
            })
        }),
        ("under way", Right, &|stage| of_each(stage, |one| one.micro_batches_under_way.to_string())),
        ("across steps", Right, &|stage| format_bytes(stage.persistent_bytes)),
        ("a step adds", Right, &|stage| format_bytes(stage.transient_bytes)),
        ("peak", Right, &|stage| format_bytes(stage.peak_bytes)),
        ("pinned", Right, &|stage| format_bytes(stage.host_pinned_bytes)),
        ("sent a step", Right, &|stage| format_bytes(stage.sent_bytes)),
        ("disk", Right, &|stage| match has_disk {
            true => format_bytes(stage.disk_bytes),
            false => String::new(),
        }),
        ("idle", Right, &idle),
    ]);
    table.without_empty_columns()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::on_paper::Paper;
    use crate::{Plan, PlannedRanks};
    use memory::Rank;
    use settings::{Config, PipelineSchedule};

    /// Four stages of a model whose head is small.
    fn config(set: &[&str]) -> Config {
        let model = [
            "parallel.pipeline=4",
            "model.layers=8",
            "model.vocab=256",
            "model.tie_embeddings=false",
            "data.seq=128",
        ];
        let mut config = Config::default();
        config.join(Rank { number: 0, of: 8 }).unwrap();
        let set = [&model[..], set].concat();
        let set: Vec<String> = set.into_iter().map(String::from).collect();
        config.with(&set).unwrap()
    }

    #[test]
    fn a_row_is_the_plan_of_its_stage() {
        let config = config(&["batch.accum=6"]);
        let planned = Plan::with_alternatives(&config, Target::Cuda).unwrap();
        let PlannedRanks {
            pipeline_stages, ..
        } = planned.ranks.unwrap();
        let settings = Settings::new(&config).unwrap();
        assert_eq!(pipeline_stages.len(), 4);
        for row in &pipeline_stages {
            let planned = Plan::new(&settings.in_stage(row.stage), Target::Cuda).unwrap();
            assert_eq!(row.peak_bytes, planned.most_bytes());
            assert_eq!(row.reserved_bytes, planned.reserved_bytes);
            assert_eq!(row.sent_bytes, planned.ranks.unwrap().sent_bytes);
            let one = PlannedVirtualStage {
                first_block: 2 * row.stage,
                blocks: 2,
                micro_batches_under_way: 4 - row.stage,
            };
            assert_eq!(row.virtual_stages, [one]);
        }
        let told = table(&pipeline_stages).to_string();
        assert_eq!(told.matches("(largest)").count(), 1, "{told}");
    }

    #[test]
    fn interleaved_stages_have_several_virtual_stages() {
        let config = config(&["batch.accum=12", "parallel.schedule=interleaved"]);
        let planned = Plan::with_alternatives(&config, Target::Cuda).unwrap();
        let stages = planned.ranks.unwrap().pipeline_stages;
        let blocks: Vec<Vec<usize>> = stages
            .iter()
            .map(|stage| {
                stage
                    .virtual_stages
                    .iter()
                    .map(|one| one.first_block)
                    .collect()
            })
            .collect();
        assert_eq!(blocks, [[0, 4], [1, 5], [2, 6], [3, 7]]);
        let told = table(&stages).to_string();
        assert!(told.contains("3, 7"), "{told}");
    }

    /// Where stages take as long as each other, they wait (p - 1) / (m v) of their work (Narayanan et al. 2021). Under zb-h1 that is a
    /// third if gradients of matrices take a third of the work (Qi et al. 2023), and more since they take less.
    #[test]
    fn stages_wait_as_long_as_published() {
        for (accum, schedule, [least, most]) in [
            (8, PipelineSchedule::Gpipe, [1.0, 1.0]),
            (8, PipelineSchedule::OneForwardOneBackward, [1.0, 1.0]),
            (40, PipelineSchedule::OneForwardOneBackward, [1.0, 1.0]),
            (8, PipelineSchedule::Interleaved, [0.5, 0.5]),
            (40, PipelineSchedule::Interleaved, [0.5, 0.5]),
            (8, PipelineSchedule::ZbH1, [0.333, 0.5]),
            (40, PipelineSchedule::ZbH1, [0.333, 0.5]),
        ] {
            let set = [
                format!("batch.accum={accum}"),
                format!("parallel.schedule={schedule}"),
                "hardware.link_gbps=1e6".into(),
                // Products take most of the time.
                "model.hidden=4096".into(),
                "model.ffn=16384".into(),
                "batch.micro=128".into(),
            ];
            let set: Vec<&str> = set.iter().map(String::as_str).collect();
            let settings = Settings::new(&config(&set)).unwrap();
            let paper = Paper::at_rates(&settings, Target::Cuda);
            let stages = paper.pipeline(&settings).unwrap();
            let all = StepOnPaper::of_all(&stages);
            let waits = (all.computing / all.working - 1.0) * accum as f64 / 3.0;
            assert!(
                (0.85 * least..1.15 * most).contains(&waits),
                "{accum} {schedule}: {waits}"
            );
        }
    }
}
