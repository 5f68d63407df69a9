//! Figures of a strategy on paper, beside its peak: the time that a step computes, which GPUs hold it, and the peaks of all ranks.

use crate::decisions::Decided;
use crate::failure::Result;
use memory::Rank;
use planner::{Plan, StepOnPaper};
use rayon::prelude::*;
use serde::Serialize;
use settings::{Config, Settings};

/// The most ranks that are planned one by one; of more, so many, spread over all.
const MOST_RANKS: usize = 64;

/// GPUs that a study is for, by their names in plans, each with its column.
pub(crate) const GPUS: [(&str, &str); 2] = [("H100 80GB", "H100"), ("H200 141GB", "H200")];

/// A strategy on paper.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PaperFigures {
    /// Milliseconds that a step computes, without copying and sending, behind which replays may hide.
    pub(crate) compute_ms: f64,
    /// Milliseconds of the whole step, with copies and messages that computing does not hide.
    pub(crate) step_ms: f64,
    /// By how much a step is longer than the baseline's for as many tokens, for each GiB saved: `step_ms` of one rank, `compute_ms` of
    /// several.
    pub(crate) ms_per_gib_saved: Option<f64>,
    /// Tokens of a step, of all ranks.
    #[serde(skip)]
    pub(crate) tokens: usize,
    /// The lowest peak of a rank.
    pub(crate) least_peak_bytes: u64,
    /// The highest.
    pub(crate) most_peak_bytes: u64,
    /// How many ranks were planned for these.
    pub(crate) ranks_planned: usize,
    /// The GPUs among [`GPUS`] that hold it, overhead included.
    pub(crate) fits: Vec<&'static str>,
}

impl PaperFigures {
    /// The time that counts for what a GiB costs. What several ranks send depends on how they are connected.
    fn ms(&self) -> f64 {
        match self.ranks_planned {
            1 => self.step_ms,
            _ => self.compute_ms,
        }
    }

    /// By how much its time for as many tokens as in the baseline's step is longer than the baseline's.
    pub(crate) fn longer_than(&self, baseline: &PaperFigures) -> f64 {
        self.ms() * (baseline.tokens as f64 / self.tokens as f64) - baseline.ms()
    }

    /// # Errors
    /// As planning the strategy.
    pub(crate) fn new(decided: &Decided, plan: &Plan) -> Result<PaperFigures> {
        let config = &decided.config;
        let target = decided.device().target();
        let of = config.rank.map_or(1, |rank| rank.of);
        let planned = of.min(MOST_RANKS);
        let peak = |index: usize| -> Result<u64> {
            if of == 1 {
                return Ok(plan.peak_bytes);
            }
            let number = index * of.saturating_sub(1) / planned.saturating_sub(1).max(1);
            let config = Config {
                rank: Some(Rank { number, of }),
                ..config.clone()
            };
            Ok(Plan::new(&Settings::new(&config)?, target)?.peak_bytes)
        };
        let peaks = (0..planned).into_par_iter().map(peak);
        let peaks = peaks.collect::<Result<Vec<u64>>>()?;
        let fits = |gpu: &&(&str, &'static str)| plan.fits.get(gpu.0) == Some(&true);
        let step = StepOnPaper::new(&Settings::new(config)?, target)?;
        Ok(PaperFigures {
            compute_ms: 1e3 * step.computing,
            step_ms: 1e3 * step.seconds,
            ms_per_gib_saved: None,
            tokens: config.batch.micro * config.micro_batches() * config.data.seq,
            least_peak_bytes: *peaks.iter().min().expect("there is a rank"),
            // Of many ranks, the one that needs most may not be among those that were planned here.
            most_peak_bytes: peaks.into_iter().fold(plan.peak_bytes, u64::max),
            ranks_planned: planned,
            fits: GPUS.iter().filter(fits).map(|(_, name)| *name).collect(),
        })
    }
}
