//! `--recompute auto`: the fastest policy on paper whose peak is within a budget.
//!
//! A layer chooses from the menu of its kind of block, which has at most six entries (`menu.rs`). `terms.rs` reads from
//! steps on paper what each entry contributes to peak and time, and `search.rs` finds the best assignment exactly. The
//! presets are compared too, so on paper the choice is never slower than a preset.

mod costs;
mod intervals;
#[cfg(test)]
mod kinds_of_block;
mod menu;
pub(crate) mod pareto;
mod search;
mod terms;
#[cfg(test)]
mod tests;

pub use costs::{CostsError, MeasuredFor};
pub use intervals::choose;
pub use pareto::{Frontier, Point};

use crate::fullest_rank::as_fullest_rank;
use crate::levers::recompute_specs;
use crate::on_paper::{OnPaper, Paper};
use kernels::Target;
use memory::{LiveLease, Place, format_bytes};
use menu::{EXHAUSTIVE_MAX, Menu};
use model::Policy;
use search::Assignment;
use serde::Serialize;
use session::{Result, SessionError};
use settings::{Config, ConfigError, Settings};
use std::collections::BTreeMap;
use terms::{Terms, picoseconds};

/// Why no policy was chosen.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum AutoError {
    /// No policy fits.
    #[error(
        "no recompute policy brings the peak within {}: the least is {} ({smallest} bytes), {pinned_by}",
        format_bytes(*budget), format_bytes(*smallest)
    )]
    Infeasible {
        budget: u64,
        smallest: u64,
        pinned_by: String,
    },
    /// The file of measured times cannot be used.
    #[error(transparent)]
    Costs(#[from] CostsError),
    /// No session can be made from the settings.
    #[error(transparent)]
    Session(#[from] SessionError),
}

impl From<ConfigError> for AutoError {
    fn from(error: ConfigError) -> AutoError {
        AutoError::Session(error.into())
    }
}

/// A policy that was chosen.
#[derive(Clone, Debug, Serialize)]
pub struct Choice {
    /// The budget for the peak.
    pub budget_bytes: u64,
    /// Its peak.
    pub peak_bytes: u64,
    /// A step on paper, in milliseconds.
    pub step_ms: f64,
    /// The same if everything is kept.
    pub keep_all_step_ms: f64,
    /// The policy as `recompute.layers`.
    pub layers: BTreeMap<String, String>,
    /// `recompute.state_interval`, where not all states are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_interval: Option<usize>,
}

impl Choice {
    /// The configuration with the policy written out, so that a run can be repeated without choosing again.
    pub fn applied_to(&self, config: &Config) -> Config {
        let mut config = config.clone();
        config.recompute.spec = "none".into();
        config.recompute.layers = self.layers.clone();
        config.recompute.state_interval = self.state_interval;
        config.recompute.costs = None;
        config.offload.activations = "none".into();
        config.memory.budget = None;
        config
    }

    /// The choice in a sentence.
    pub fn describe(&self) -> String {
        format!(
            "recompute auto: a peak of {} within {}, a step on paper of {:.3} ms ({:.1} % more than keeping everything): {}",
            format_bytes(self.peak_bytes),
            format_bytes(self.budget_bytes),
            self.step_ms,
            100.0 * (self.step_ms / self.keep_all_step_ms - 1.0),
            self.policy(),
        )
    }

    /// The policy in words.
    pub fn policy(&self) -> String {
        let layers = layers_in_words(&self.layers);
        match self.state_interval {
            Some(interval) => format!("{layers}; state_interval {interval}"),
            None => layers,
        }
    }
}

/// Policies of layers in words, as `recompute.layers` has them.
pub fn layers_in_words(layers: &BTreeMap<String, String>) -> String {
    if layers.is_empty() {
        return "everything is kept".into();
    }
    let first = |key: &str| key.split('-').next().and_then(|first| first.parse().ok());
    let mut layers: Vec<_> = layers.iter().collect();
    layers.sort_by_key(|(key, _)| first(key).unwrap_or(0usize));
    let layers: Vec<String> = layers
        .into_iter()
        .map(|(key, clauses)| match key.contains('-') {
            true => format!("layers {key} {clauses}"),
            false => format!("layer {key} {clauses}"),
        })
        .collect();
    layers.join("; ")
}

/// What does not depend on the budget, computed once: so choices for several budgets are quick.
pub(crate) struct Chooser {
    settings: Settings,
    paper: Paper,
    keep_all: OnPaper,
    presets: Vec<Preset>,
    /// The assignments without offload.
    resident: Space,
    /// Policies that are chosen beforehand for some budgets, used if a step's time is not a sum over layers: only a
    /// step on paper shows how queues share a link, and which copies hide behind computation. Choosing from a fixed
    /// list ensures that more memory never means a slower policy.
    listed: Vec<Candidate>,
}

/// The assignments of a menu's entries to layers.
struct Space {
    menu: Menu,
    terms: Terms,
}

/// The number of steps between the budgets that [`Chooser::listed`] has policies for.
const BUDGETS: u64 = 48;

/// Times that differ by less than this share count as equal: the order of sums changes their rounding.
const ROUNDING: f64 = 1e-9;

/// A recompute specification that users know by name.
pub(crate) struct Preset {
    pub(crate) spec: String,
    /// Picoseconds that all blocks take for a micro-batch.
    cost: u64,
    pub(crate) candidate: Candidate,
}

/// A policy with its step on paper.
#[derive(Clone)]
pub(crate) struct Candidate {
    policy: Policy,
    pub(crate) peak: u64,
    pub(crate) seconds: f64,
}

/// The fastest candidate; of equally fast ones, the one with the lowest peak.
fn best(candidates: &[Candidate]) -> Option<&Candidate> {
    let slowest = at_most_as_slow(candidates.iter().map(|one| one.seconds))?;
    let fastest = candidates.iter().filter(|one| one.seconds <= slowest);
    fastest.min_by_key(|one| one.peak)
}

/// The longest time that counts as equal to the shortest one.
fn at_most_as_slow(times: impl Iterator<Item = f64>) -> Option<f64> {
    Some(times.min_by(f64::total_cmp)? * (1.0 + ROUNDING))
}

impl Space {
    fn new(settings: &Settings, paper: &Paper, offloads: bool, exhaustive: usize) -> Result<Space> {
        let menu = Menu::new(settings, paper, offloads, exhaustive)?;
        Ok(Space {
            terms: Terms::of(settings, paper, &menu)?,
            menu,
        })
    }

    fn policy(&self, assignment: &Assignment) -> Policy {
        self.menu.policy(|layer| assignment.entries[layer])
    }
}

impl Chooser {
    pub(crate) fn new(config: &Config, target: Target) -> Result<Chooser, AutoError> {
        let mut resident = config.clone();
        resident.recompute.spec = "none".into();
        resident.recompute.layers.clear();
        resident.offload.activations = "none".into();
        let (_, settings) = as_fullest_rank(resident)?;
        let measured = costs::read(config.recompute.costs.as_deref(), &settings, target)?;
        let paper = Paper::new(&settings, target, measured);
        Chooser::of(settings, paper, config.chooses_offload(), EXHAUSTIVE_MAX)
    }

    /// The same for settings that keep everything. Every way is tried for kinds of at most `exhaustive` labels.
    fn of(
        settings: Settings,
        paper: Paper,
        offloads: bool,
        exhaustive: usize,
    ) -> Result<Chooser, AutoError> {
        let specs = recompute_specs(&settings.policy).into_iter();
        let presets = specs.map(|spec| Preset::new(spec, &settings, &paper));
        let mut chooser = Chooser {
            presets: presets.collect::<Result<_, _>>()?,
            keep_all: paper.step(&settings)?,
            resident: Space::new(&settings, &paper, false, exhaustive)?,
            listed: Vec::new(),
            settings,
            paper,
        };
        if !chooser.keep_all.computes_alone() {
            chooser.listed = chooser.over_budgets(&chooser.resident)?;
        }
        if offloads {
            let space = Space::new(&chooser.settings, &chooser.paper, true, exhaustive)?;
            let offloading = chooser.over_budgets(&space)?;
            chooser.listed.extend(offloading);
        }
        Ok(chooser)
    }

    /// The best policies of a space, for budgets from its lowest peak to that of keeping everything.
    fn over_budgets(&self, space: &Space) -> Result<Vec<Candidate>> {
        let least = space.terms.smallest().peak;
        let most = self.keep_all.peak.bytes.max(least);
        let mut candidates: Vec<Candidate> = Vec::new();
        for step in 0..=BUDGETS {
            let budget = least + (most - least) * step / BUDGETS;
            let best = space.terms.any_cheapest(budget, u64::MAX);
            let best = best.expect("the lowest peak is within every budget");
            if candidates.last().is_none_or(|last| last.peak != best.peak) {
                candidates.push(self.candidate(space, &best)?);
            }
        }
        Ok(candidates)
    }

    /// Plans an assignment by a step on paper.
    fn candidate(&self, space: &Space, assignment: &Assignment) -> Result<Candidate> {
        let policy = space.policy(assignment);
        let step = self.on_paper(&policy)?;
        Ok(Candidate {
            peak: step.peak.bytes,
            seconds: step.seconds,
            policy,
        })
    }

    /// The fastest policy within a budget, of equally fast ones the one with the lowest peak; none if nothing fits.
    fn within(&self, budget: u64) -> Result<Option<Choice>> {
        let interval = self.settings.state_interval;
        let choice = |best: Candidate| Choice {
            budget_bytes: budget,
            peak_bytes: best.peak,
            step_ms: 1e3 * best.seconds,
            keep_all_step_ms: 1e3 * self.keep_all.seconds,
            layers: best.policy.to_layers(),
            state_interval: (interval > 1).then_some(interval),
        };
        Ok(self.best(budget)?.map(choice))
    }

    fn best(&self, budget: u64) -> Result<Option<Candidate>> {
        let presets = self.presets.iter().map(|preset| &preset.candidate);
        let known = presets.chain(&self.listed).cloned();
        let assigned = self.assigned(budget)?;
        // If the terms are off, a better policy may be missed, but the peak is still within the budget.
        let all: Vec<Candidate> = known
            .chain(assigned)
            .filter(|candidate| candidate.peak <= budget)
            .collect();
        Ok(best(&all).cloned())
    }

    /// The best assignment of the menu's entries; none if time is not a sum over layers, or if a preset is better.
    fn assigned(&self, budget: u64) -> Result<Option<Candidate>> {
        if !self.keep_all.computes_alone() {
            return Ok(None);
        }
        let presets = self.presets.iter();
        let presets = presets.filter(|preset| preset.candidate.peak <= budget);
        let known = presets.map(|preset| (preset.cost, preset.candidate.peak));
        let known = known.min();
        let assigned = self.resident.terms.cheapest(budget);
        // A preset may be better, because the menus do not have every way.
        let assigned = assigned
            .filter(|assigned| known.is_none_or(|known| (assigned.cost, assigned.peak) <= known));
        let assigned = assigned.map(|assigned| self.candidate(&self.resident, &assigned));
        assigned.transpose()
    }

    fn on_paper(&self, policy: &Policy) -> Result<OnPaper> {
        self.paper.step(&Settings {
            policy: policy.clone(),
            ..self.settings.clone()
        })
    }

    /// The policy with the lowest peak.
    pub(crate) fn smallest(&self) -> Result<Candidate> {
        let presets = self.presets.iter().map(|preset| &preset.candidate);
        let known = presets.chain(&self.listed).cloned();
        let resident = match self.keep_all.computes_alone() {
            true => Some(self.candidate(&self.resident, &self.resident.terms.smallest())?),
            false => None,
        };
        let all = known.chain(resident);
        Ok(all.min_by_key(|one| one.peak).expect("there is one"))
    }

    /// The error for a budget that no policy fits, with the lowest peak of any policy and its largest leases.
    fn infeasible(&self, budget: u64) -> Result<AutoError> {
        let least = self.smallest()?;
        let step = self.on_paper(&least.policy)?;
        Ok(AutoError::Infeasible {
            budget,
            smallest: least.peak,
            pinned_by: pinned_by(&step.largest_at_peak, step.peak.place),
        })
    }
}

/// The largest leases at a peak, in words.
fn pinned_by(largest: &[LiveLease], place: Place) -> String {
    let largest = largest.iter().take(3);
    let largest: Vec<String> = largest
        .map(|lease| format!("`{}` with {}", lease.name, format_bytes(lease.bytes)))
        .collect();
    format!("in {place}, where the largest are {}", largest.join(", "))
}

impl Preset {
    fn new(spec: String, settings: &Settings, paper: &Paper) -> Result<Preset, AutoError> {
        let (labels, layers) = (settings.policy.labels, settings.policy.layers());
        let policy = Policy::with_layers(labels, &spec, &BTreeMap::new(), layers);
        let policy = policy.map_err(ConfigError::from)?;
        let step = paper.step(&Settings {
            policy: policy.clone(),
            ..settings.clone()
        })?;
        Ok(Preset {
            spec,
            cost: picoseconds(step.busy_in_blocks()),
            candidate: Candidate {
                policy,
                peak: step.peak.bytes,
                seconds: step.seconds,
            },
        })
    }
}
