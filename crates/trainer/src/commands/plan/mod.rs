//! The `plan` command: the memory of a run, without its device.

mod advice;
mod from;
mod generation;
mod pareto;

use crate::args::{RankArgs, RunArgs};
use crate::begin::begin;
use crate::decisions::{self, planning};
use crate::failure::Failure;
use crate::stdout::{print, print_json};
use crate::tracer::{draw_plan, trace_folder};
pub(super) use advice::device_memory_bytes;
use advice::{AdviceArgs, answer};
use clap::Args;
use from::{FromArgs, FromFiles, PlanOf};
use generation::{GenerationArgs, print_generation_plan};
use memory::format_bytes;
use pareto::ParetoArgs;
use planner::Plan;
use settings::{Config, ConfigError, Given, Resolved, Size, Task, resolve};

/// Flags of `plan`.
#[derive(Clone, Debug, Default, Args)]
pub struct PlanArgs {
    /// Print plan.json to standard output
    #[arg(long)]
    pub json: bool,
    /// Files of other trainers.
    #[command(flatten)]
    pub from: FromArgs,
    /// Flags for advice beside the plan.
    #[command(flatten)]
    pub advice: AdviceArgs,
    /// Flags for the best policy at each budget.
    #[command(flatten)]
    pub pareto: ParetoArgs,
    /// Flags for the memory of generation.
    #[command(flatten)]
    pub generation: GenerationArgs,
    /// The rank whose plan is made.
    #[command(flatten)]
    pub rank: RankArgs,
    /// The flags of `train`.
    #[command(flatten)]
    pub run: RunArgs,
}

impl PlanArgs {
    /// The configuration of the flags. Files of `--from` are read when the plan is made.
    pub(crate) fn resolve(&self) -> Result<Resolved, ConfigError> {
        let given = Given {
            rank: self.rank.rank(),
            ..self.run.given()
        };
        resolve(Task::Plan, given, self.run.options(self.json))
    }
}

/// Prints the plan of a run, or of generation.
pub(crate) fn plan(args: &PlanArgs) -> Result<(), Failure> {
    let read = args.from.read(&args.run, args.rank)?;
    let mut args = args.clone();
    let foreign = read.map(|read| {
        (args.run, args.rank) = (read.run, read.rank);
        (read.files, read.taken)
    });
    let mut resolved = args.resolve()?;
    begin(&mut resolved)?;
    match args.generation.generate {
        Some(tokens) => print_generation_plan(&resolved, tokens, args.generation.batch),
        None => {
            let from =
                foreign.map(|(files, taken)| FromFiles::new(files, taken, &args.run, &resolved));
            print_plan(&resolved, &args, from.as_ref())
        }
    }
}

fn print_plan(
    resolved: &Resolved,
    args: &PlanArgs,
    from: Option<&FromFiles>,
) -> Result<(), Failure> {
    let folder = trace_folder(resolved)?;
    let target = resolved.device().target();
    let config = decisions::on_paper(resolved, args.advice.device_bytes()?)?;
    let busy = planning(resolved.options.quiet);
    let plan = Plan::with_alternatives(&config, target)?;
    let mut plan = answer(&args.advice, &args.run, resolved, &config, plan)?;
    // Without a policy, which is chosen again for each budget.
    let open = Config {
        recompute: resolved.config.recompute.clone(),
        offload: resolved.config.offload.clone(),
        ..config.clone()
    };
    plan.pareto = args.pareto.answer(&open, target)?;
    drop(busy);
    match resolved.options.json {
        true => print_json(&PlanOf { plan: &plan, from })?,
        false => {
            let from = from.map(ToString::to_string).unwrap_or_default();
            print(format_args!("{}{from}", in_words(&plan, resolved)))?;
        }
    }
    args.pareto.draw(&plan)?;
    match folder {
        Some(folder) => draw_plan(folder, resolved, &config),
        None => Ok(()),
    }
}

/// The plan and the answers that were asked for, in words.
fn in_words(plan: &Plan, resolved: &Resolved) -> String {
    let verdict = verdict(resolved, plan);
    let pareto = plan.pareto.as_ref().map(pareto::tables);
    let largest = plan.largest.as_ref().map(|largest| format!("\n{largest}"));
    let advice = plan.advice.as_ref().map(ToString::to_string);
    let layouts = plan.layouts.as_ref().map(ToString::to_string);
    let asked = [pareto, largest, advice, layouts].into_iter().flatten();
    format!("{plan}{verdict}{}", asked.collect::<String>())
}

/// Whether the plan's peak, and that of each stage of a pipeline, fits a limit in bytes. A limit as a share of a device cannot be
/// checked without it.
fn verdict(resolved: &Resolved, plan: &Plan) -> String {
    let Some(Size::Bytes(limit)) = resolved.config.memory.limit else {
        return String::new();
    };
    let fits = |peak_bytes| match peak_bytes <= limit {
        true => "fits",
        false => "does not fit",
    };
    let limit_is = format!("the limit of {} ({limit} bytes)", format_bytes(limit));
    let stages = plan.ranks.iter().flat_map(|ranks| &ranks.pipeline_stages);
    let stages = stages.map(|stage| (format!("stage {}", stage.stage), stage.peak_bytes));
    let mut all: Vec<(String, u64)> = stages.collect();
    if all.is_empty() {
        all.push(("the peak".into(), plan.most_bytes()));
    }
    let lines = all
        .into_iter()
        .map(|(what, peak)| format!("\n{what} {} {limit_is}", fits(peak)));
    lines.collect::<String>() + "\n"
}
