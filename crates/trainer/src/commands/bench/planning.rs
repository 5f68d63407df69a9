//! Plans every strategy before any is measured, and finds those that cannot be run.

use super::args::Shared;
use super::matrix::BenchStrategy;
use super::measure::Outcome;
use super::paper::PaperFigures;
use super::rows::Planned;
use crate::decisions::{self, Decided};
use crate::failure::{Failure, Result};
use crate::limits::{limit_of_plan, refuse_without_room};
use crate::model_tokens::{ModelTokens, describe};
use crate::reference;
use crate::samples::data_options;
use crate::threads::start_threads;
use memory::{Rank, format_bytes};
use planner::Plan;
use settings::{Completed, ConfigError, Settings};

/// The plans of all strategies.
pub(super) struct PlannedMatrix {
    pub(super) planned: Vec<Planned>,
    pub(super) device: String,
}

impl PlannedMatrix {
    /// Plans every strategy. One with contradictory settings is skipped; it is an error only if all are.
    ///
    /// # Errors
    /// A mistake in the matrix, such as a file that does not exist; else the first contradiction, if every strategy has one.
    pub(super) fn new(shared: &Shared) -> Result<PlannedMatrix> {
        let strategies = &shared.strategies;
        let mut all = Vec::new();
        for strategy in strategies {
            match shared.resolve(strategy) {
                Err(failure) if is_mistake(&failure) => return Err(failure),
                completed => all.push(completed),
            }
        }
        let completed: Vec<&Completed> = all.iter().flatten().collect();
        if let Some(first) = completed.first() {
            start_threads(first.config.train.threads)?;
        }
        warn_of_settings_in_vain(&completed);
        let device = completed.last().map(|one| one.device().to_string());
        let mut refused = None;
        let planned = strategies.iter().zip(all).map(|(strategy, completed)| {
            let planned =
                completed.and_then(|completed| plan_strategy(shared, strategy, &completed));
            planned.unwrap_or_else(|failure| {
                let outcome = match failure.exit_code() {
                    3 => Outcome::Oom,
                    _ => Outcome::Skipped,
                };
                let obstacle = Some((outcome, failure.to_string()));
                refused.get_or_insert(failure);
                Planned {
                    strategy: strategy.clone(),
                    decided: None,
                    plan: None,
                    paper: None,
                    obstacle,
                }
            })
        });
        let planned: Vec<Planned> = planned.collect();
        let is_out = |one: &Planned| {
            let is_skipped = matches!(one.obstacle, Some((Outcome::Skipped, _)));
            one.plan.is_none() && is_skipped
        };
        match refused {
            Some(failure) if planned.iter().all(is_out) => Err(failure),
            _ => Ok(PlannedMatrix {
                planned,
                device: device.unwrap_or_default(),
            }),
        }
    }

    /// Refuses data that the model may not read, before anything is measured. A plan reads the data only if the command line
    /// names it.
    ///
    /// # Errors
    /// As training would refuse it.
    pub(super) fn refuse_foreign_data(&self, shared: &Shared) -> Result {
        let reads = |planned: &Planned| match shared.plans_only() {
            true => shared.names_data,
            false => planned.obstacle.is_none(),
        };
        let mut seen = Vec::new();
        let read = self.planned.iter().filter(|planned| reads(planned));
        for decided in read.filter_map(|planned| planned.decided.as_ref()) {
            let options = data_options(&decided.config, true);
            // Strategies may set keys of the data: each way to read it is tried once.
            let (path, format, seq) = (&options.path, options.format, options.seq);
            let same = format!("{path:?} {format:?} {:?} {seq:?}", options.packing);
            if seen.contains(&same) {
                continue;
            }
            let config = &decided.config;
            let from = decided.options.init_from.as_deref();
            let tokens = ModelTokens::of_run(config.model.vocab, from);
            let dataset = tokens.open_own(&options, config)?;
            let dataset = reference::attach(dataset, config)?;
            if seen.is_empty() {
                tracing::info!("training on {}", describe(&dataset));
            }
            seen.push(same);
        }
        Ok(())
    }
}

/// Whether a strategy was refused because of a mistake in writing it, such as an unknown key or a file that does not exist, and not
/// because its settings do not go together.
fn is_mistake(failure: &Failure) -> bool {
    match failure {
        Failure::Config(error) => matches!(
            error,
            ConfigError::UnknownKey { .. }
                | ConfigError::UnknownPreset { .. }
                | ConfigError::Unreadable { .. }
                | ConfigError::Syntax { .. }
                | ConfigError::Value { .. }
        ),
        failure => failure.exit_code() == 4,
    }
}

/// Warns of keys that have no effect on any strategy.
fn warn_of_settings_in_vain(strategies: &[&Completed]) {
    let decided = |one: &&Completed| one.decided(one.config.data.seq);
    let mut in_vain = strategies.iter().map(|one| decided(one).allowed_in_vain());
    let first = in_vain.next().unwrap_or_default();
    let others: Vec<_> = in_vain.collect();
    for (key, needs) in first {
        let is_in_vain = |of: &Vec<(&str, &str)>| of.iter().any(|(other, _)| *other == key);
        if others.iter().all(is_in_vain) {
            tracing::warn!("{key} has no effect on any strategy: it is for {needs}");
        }
    }
}

/// Plans a strategy, and says why it cannot run, if it cannot.
fn plan_strategy(
    shared: &Shared,
    strategy: &BenchStrategy,
    completed: &Completed,
) -> Result<Planned> {
    let decided = decisions::on_paper(completed, shared.device_bytes())?;
    let decided = match shared.names_rank {
        true => decided,
        false => decided.of_fullest_rank()?,
    };
    let settings = Settings::new(&decided.config)?;
    let plan = Plan::new(&settings, decided.device().target())?;
    let stages = other_stages(shared, &decided)?;
    let is_on_paper = shared.matrix.paper && shared.plans_only();
    let paper = is_on_paper.then(|| PaperFigures::new(&decided, &plan));
    Ok(Planned {
        strategy: strategy.clone(),
        paper: paper.transpose()?,
        obstacle: obstacle(shared, &decided, &plan, &stages),
        plan: Some(plan),
        decided: Some(decided),
    })
}

/// What a device has to hold: what is reserved, and the overhead.
fn needs_bytes(plan: &Plan) -> u64 {
    plan.reserved_bytes + plan.device_overhead_bytes
}

/// The plans of a rank of each other stage of a pipeline, if something limits them: any of them may need the most.
fn other_stages(shared: &Shared, decided: &Decided) -> Result<Vec<Plan>> {
    let is_limited = shared.device_bytes().is_some() || limit_of_plan(&decided.config).is_some();
    let Some(rank) = decided.config.rank.filter(|_| is_limited) else {
        return Ok(Vec::new());
    };
    let of_stage = rank.of / decided.config.parallel.pipeline;
    let others = (0..rank.of).step_by(of_stage);
    let others = others.filter(|first| first / of_stage != rank.number / of_stage);
    let plan = |number| -> Result<Plan> {
        let mut config = decided.config.clone();
        config.rank = Some(Rank { number, ..rank });
        Ok(Plan::new(
            &Settings::new(&config)?,
            decided.device().target(),
        )?)
    };
    others.map(plan).collect()
}

/// Why a strategy is not run: a plan exceeds a limit in bytes or the device, or this host has no room for it.
fn obstacle(
    shared: &Shared,
    decided: &Decided,
    plan: &Plan,
    stages: &[Plan],
) -> Option<(Outcome, String)> {
    let is_forced = decided.config.memory.force && !shared.plans_only();
    let too_large = || exceeds(shared, decided, plan, stages);
    if let Some(reason) = (!is_forced).then(too_large).flatten() {
        return Some((Outcome::Oom, reason));
    }
    if shared.plans_only() {
        return None;
    }
    if let Some(rank) = decided.config.rank.filter(|rank| rank.of > 1) {
        return Some((
            Outcome::Skipped,
            format!(
                "bench plans {} ranks and measures none: a launcher starts them, such as `mpirun -n {} trainer train`",
                rank.of, rank.of
            ),
        ));
    }
    if is_forced {
        return None;
    }
    let (target, limit) = (decided.device().target(), limit_of_plan(&decided.config));
    let refused = refuse_without_room(&decided.config, plan, target, limit).err()?;
    Some((Outcome::Oom, refused.to_string()))
}

/// By how much a plan exceeds a limit in bytes or the device, in words.
fn exceeds(shared: &Shared, decided: &Decided, plan: &Plan, stages: &[Plan]) -> Option<String> {
    let limit = limit_of_plan(&decided.config);
    // The plan that needs the most, and by how much that is more than there is.
    let beyond = |needed: fn(&Plan) -> u64, has: Option<u64>| {
        let most = stages
            .iter()
            .chain([plan])
            .max_by_key(|plan| needed(plan))?;
        let beyond = needed(most).saturating_sub(has?);
        let largest = most.largest_at_peak.first().map_or("", |lease| lease.name);
        (beyond > 0).then(|| (most, format_bytes(beyond), largest))
    };
    if let Some((_, beyond, largest)) = beyond(Plan::most_bytes, limit) {
        return Some(format!(
            "the plan's peak is {beyond} above the limit; the largest at it is `{largest}`"
        ));
    }
    let (most, beyond, largest) = beyond(needs_bytes, shared.device_bytes())?;
    Some(format!(
        "it needs {}, overhead included, which is {beyond} more than --device-memory; the largest at the peak is `{largest}`",
        format_bytes(needs_bytes(most))
    ))
}
