//! The `plan` command: the memory of a run, without its device.

mod advice;
mod from;
mod generation;
mod pareto;
mod verdict;

use crate::args::{RankArgs, RunArgs};
use crate::begin::begin;
use crate::decisions::{self, Decided, planning};
use crate::failure::Result;
use crate::initial_model::beyond_context;
use crate::stdout::{print, print_json};
use crate::tracer::{draw_plan, trace_folder};
pub(super) use advice::device_memory_bytes;
use advice::{AdviceArgs, answer};
use clap::Args;
use from::{FromArgs, FromFiles, PlanOf};
use generation::{GenerationArgs, print_generation_plan};
use memory::format_bytes;
use pareto::ParetoArgs;
use planner::{Plan, block_shared_bytes, layers_in_words};
use settings::{
    Completed, Config, ConfigError, Given, RecomputeConfig, Resolved, Settings, Task,
    check_shared_memory, resolve,
};
use verdict::{refuse_too_large, verdict};

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
pub(crate) fn plan(args: &PlanArgs) -> Result {
    let read = args.from.read(&args.run, args.rank)?;
    let mut args = args.clone();
    let foreign = read.map(|read| {
        (args.run, args.rank) = (read.run, read.rank);
        (read.files, read.taken)
    });
    let completed = begin(args.resolve()?)?;
    match args.generation.generate {
        Some(tokens) => print_generation_plan(&completed, tokens, args.generation.batch),
        None => {
            let from =
                foreign.map(|(files, taken)| FromFiles::new(files, taken, &args.run, &completed));
            print_plan(&completed, &args, from.as_ref())
        }
    }
}

fn print_plan(completed: &Completed, args: &PlanArgs, from: Option<&FromFiles>) -> Result {
    let folder = trace_folder(completed)?;
    let target = completed.device().target();
    let decided = decisions::on_paper(completed, args.advice.device_bytes()?)?;
    let decided = match args.rank.rank {
        Some(_) => decided,
        None => decided.of_fullest_rank()?,
    };
    let config = &decided.config;
    if let Some(gpu) = &args.advice.device_memory {
        check_shared_memory(config, gpu, block_shared_bytes(gpu))?;
    }
    let busy = planning(completed.options.quiet);
    let mut plan = Plan::with_alternatives(config, target)?;
    let beyond = beyond_context(completed, config.data.seq);
    plan.notes.splice(0..0, beyond);
    let mut plan = answer(&args.advice, &args.run, completed, config, plan)?;
    // Without a policy, which is chosen again for each budget.
    let open = Config {
        recompute: completed.config.recompute.clone(),
        offload: completed.config.offload.clone(),
        ..config.clone()
    };
    plan.pareto = args.pareto.answer(&open, target)?;
    drop(busy);
    match completed.options.json {
        true => print_json(&PlanOf { plan: &plan, from })?,
        false => {
            let from = from.map(ToString::to_string).unwrap_or_default();
            let words = in_words(&plan, &decided)?;
            print(format_args!("{words}{from}"))?;
        }
    }
    args.pareto.draw(&plan)?;
    if let Some(folder) = folder {
        draw_plan(folder, config)?;
    }
    refuse_too_large(&plan, &decided)
}

/// What is planned, the answers that were asked for, and the plan.
fn in_words(plan: &Plan, decided: &Decided) -> Result<String> {
    let step = step_in_words(decided)?;
    let title = plan.title();
    let pareto = plan.pareto.as_ref().map(pareto::tables);
    let largest = plan.largest.as_ref().map(|largest| format!("\n{largest}"));
    let advice = plan.advice.as_ref().map(ToString::to_string);
    let layouts = plan.layouts.as_ref().map(ToString::to_string);
    let beside = plan.beside_bytes.map(|bytes| {
        format!(
            "\nbeside another program that keeps {} of the device ({bytes} bytes)\n",
            format_bytes(bytes)
        )
    });
    let asked = [
        beside,
        largest,
        Some(verdict(decided, plan)),
        advice,
        layouts,
        pareto,
    ];
    let asked: String = asked.into_iter().flatten().collect();
    let after = if asked.is_empty() { "" } else { "\n" };
    Ok(format!("{step}\n{title}\n{asked}{after}{plan}"))
}

/// The model, the tokens of a step, and what is recomputed.
fn step_in_words(decided: &Decided) -> Result<String> {
    let settings = Settings::new(&decided.config)?;
    let is_changed = decided.given.config.is_none() && decided.options.init_from.is_none();
    let of_own = is_changed && !decided.explicit_model_keys.is_empty();
    let name = match of_own {
        true => "a model of [model]",
        false => decided.name.as_str(),
    };
    let (seq, micro, accum) = (settings.seq, settings.micro_batch, settings.accum);
    let ranks = match settings.tokens_a_step() / (seq * micro * accum) {
        1 => String::new(),
        groups => format!(" x {groups} groups of ranks"),
    };
    let RecomputeConfig { spec, layers, .. } = &decided.config.recompute;
    let recompute = match (&spec[..], layers.is_empty()) {
        (spec, true) => spec.to_string(),
        ("none", false) => layers_in_words(layers),
        (spec, false) => format!("{spec}, but {}", layers_in_words(layers)),
    };
    Ok(format!(
        "{name}: {} tokens a step (seq {seq} x micro-batch {micro} x accum {accum}{ranks}), recompute {recompute}",
        settings.tokens_a_step()
    ))
}
