//! Peaks and times of chosen policies over a range of budgets, beside the presets: `plan --pareto`.

use super::intervals::Choosers;
use super::{AutoError, Choice};
use kernels::Target;
use serde::Serialize;
use settings::check::not_chosen;
use settings::{Config, ConfigError};

/// The number of steps between budgets, from the lowest peak to that of keeping everything.
const BUDGETS: u64 = 24;

/// A policy that takes more memory must save this share of a step's time. A smaller share does not show in five digits.
const WORTH: f64 = 1e-4;

/// Chosen policies and presets.
#[derive(Clone, Debug, Serialize)]
pub struct Frontier {
    /// Chosen policies, the lowest peak first. Each is faster than the one before by a share that is worth more memory.
    pub chosen: Vec<Choice>,
    /// The recompute specifications that plans compare, the lowest peak first.
    pub presets: Vec<Point>,
}

/// A specification on paper.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// The specification.
    pub recompute: String,
    /// Its peak.
    pub peak_bytes: u64,
    /// A step on paper, in milliseconds.
    pub step_ms: f64,
}

impl Frontier {
    /// Chooses policies for budgets from the lowest peak to that of keeping everything.
    ///
    /// # Errors
    /// As [`super::choose`], but never because nothing fits.
    pub fn new(config: &Config, target: Target) -> Result<Frontier, AutoError> {
        if let Some(reason) = not_chosen(config) {
            return Err(ConfigError::Contradiction(reason.into()).into());
        }
        let choosers = Choosers::new(config, target)?;
        let [least, most] = choosers.peaks()?;
        let mut chosen: Vec<Choice> = Vec::new();
        for step in 0..=BUDGETS {
            let budget = least + (most.max(least) - least) * step / BUDGETS;
            let choice = choosers.choose(budget)?;
            let is_worth = |last: &Choice| {
                last.peak_bytes < choice.peak_bytes && choice.step_ms < last.step_ms * (1.0 - WORTH)
            };
            if chosen.last().is_none_or(is_worth) {
                chosen.push(choice);
            }
        }
        let presets = choosers.presets().iter().map(|preset| Point {
            recompute: preset.spec.clone(),
            peak_bytes: preset.candidate.peak,
            step_ms: 1e3 * preset.candidate.seconds,
        });
        let mut presets: Vec<Point> = presets.collect();
        presets.sort_by_key(|preset| preset.peak_bytes);
        Ok(Frontier { chosen, presets })
    }
}
