//! Carries a command out.

use crate::advise::answer;
use crate::attention;
use crate::cli::{DoctorArgs, PlanArgs};
use crate::device::device_of_rank;
use crate::failure::Failure;
use crate::generate::print_generation_plan;
use crate::job::Ended;
use crate::pareto;
use crate::settled::{self, planning};
use crate::stdout::{print, print_json};
use crate::tracer::{draw_plan, trace_folder};
use crate::train::resumed_configuration;
use collectives::Launch;
use memory::format_bytes;
use model::ModelConfig;
use planner::Plan;
use settings::load::{Source, load};
use settings::{AutoOr, Config, ConfigError, Resolved, Resume, Size, Task, check};
use std::path::Path;

/// Trains; as one of several ranks, if a launcher started this process so.
pub(crate) fn train(mut resolved: Resolved, launch: Option<&Launch>) -> Result<(), Ended> {
    if let (Some(launch), Some(_)) = (launch, resolved.config.rank) {
        let device = resolved.device();
        resolved.config.train.device = Some(device_of_rank(device, launch.local_rank));
    }
    prepare(&mut resolved)?;
    crate::train::train(resolved, launch)
}

/// Carries `profile` out.
pub(crate) fn profile(mut resolved: Resolved) -> Result<(), Failure> {
    prepare(&mut resolved)?;
    crate::profile::profile(&resolved)
}

/// Carries `tune` out.
pub(crate) fn tune(mut resolved: Resolved) -> Result<(), Failure> {
    prepare(&mut resolved)?;
    crate::tune::tune(&resolved)
}

/// Carries `init` out.
pub(crate) fn initialise(mut resolved: Resolved) -> Result<(), Failure> {
    prepare(&mut resolved)?;
    crate::initialise::initialise(&resolved)
}

/// Carries `plan` out, with the flags that it has beside those of `train`.
pub(crate) fn plan(mut resolved: Resolved, args: &PlanArgs) -> Result<(), Failure> {
    prepare(&mut resolved)?;
    match args.generation.generate {
        Some(tokens) => print_generation_plan(&resolved, tokens, args.generation.batch),
        None => print_plan(&resolved, args),
    }
}

/// Carries `doctor` out, with the flags that it has beside a configuration.
pub(crate) fn doctor(
    mut resolved: Resolved,
    args: &DoctorArgs,
    launch: Option<&Launch>,
) -> Result<(), Ended> {
    prepare(&mut resolved)?;
    crate::doctor::doctor(&resolved, args.path.as_deref(), launch)
}

fn prepare(resolved: &mut Resolved) -> Result<(), Failure> {
    start_threads(resolved.config.train.threads)?;
    for (key, needs) in resolved.config.unused() {
        tracing::warn!("{key} has no effect on the run: it is for {needs}");
    }
    // How many steps some epochs are is known once the data is open.
    if resolved.config.train.epochs.is_none() {
        warn_of_warmup(&resolved.config);
    }
    keep_head_chunk(resolved)?;
    match resolved.options.init_from.clone() {
        Some(folder) => adopt_model(resolved, &folder),
        None => Ok(()),
    }
}

/// Says that a run ends before its warmup does.
pub(crate) fn warn_of_warmup(config: &Config) {
    let (warmup, steps) = (config.lr.warmup_steps, config.train.steps);
    if warmup > steps {
        tracing::warn!(
            "the learning rate never reaches lr.peak: lr.warmup_steps is {warmup}, and the run has {steps} steps"
        );
    }
}

/// The threads that are asked for, at most one for each processor that this process may use: more would wait for each other.
pub(crate) fn threads_of(asked: Option<usize>) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    match asked {
        Some(asked) if asked > processors => {
            tracing::warn!(
                "{asked} threads are asked for, and this process may use {processors} {}: it takes one thread for each",
                if processors == 1 {
                    "processor"
                } else {
                    "processors"
                }
            );
            processors
        }
        asked => asked.unwrap_or(processors),
    }
}

/// The main thread is one of the pool's: operations start without handing over.
pub(crate) fn start_threads(threads: Option<usize>) -> Result<(), Failure> {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads_of(threads))
        .use_current_thread();
    pool.build_global()
        .map_err(|error| Failure::Usage(format!("the worker threads did not start: {error}")))
}

/// Keys of `[model]` that no weight's shape depends on: a run may change them for a model that it starts from.
const FREE_OF_SHAPES: [&str; 7] = [
    "dropout",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
    "sliding_window",
    "full_attention_layers",
    "init_std",
];

/// `--init-from` sets the model; what the user said about the shapes of its weights must agree, and the rest is taken.
pub(crate) fn adopt_model(resolved: &mut Resolved, folder: &Path) -> Result<(), Failure> {
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|source| Failure::Unreadable {
        path: path.clone(),
        source,
    })?;
    let model = ModelConfig::from_hf(&text).map_err(|source| Failure::HfConfig {
        path: path.clone(),
        source,
    })?;
    let as_toml = |model: &ModelConfig| {
        toml::Table::try_from(model).map_err(|error| Failure::Usage(error.to_string()))
    };
    let (given, mut taken) = (as_toml(&resolved.config.model)?, as_toml(&model)?);
    for key in &resolved.explicit_model_keys {
        let name = key.trim_start_matches("model.");
        // A key of a section of its own goes with the whole section.
        let name = name.split('.').next().unwrap_or(name);
        if given.get(name) == taken.get(name) {
            continue;
        }
        let show = |value: Option<&toml::Value>| value.map_or("absent".into(), ToString::to_string);
        let (ours, theirs) = (show(given.get(name)), show(taken.get(name)));
        if !FREE_OF_SHAPES.contains(&name) {
            return Err(Failure::Usage(format!(
                "{key} is {ours}, but {} says {theirs}; leave the setting out, or start from another model",
                path.display(),
            )));
        }
        tracing::warn!(
            "model.{name} is {ours}, where {} says {theirs}",
            path.display()
        );
        match given.get(name) {
            Some(value) => taken.insert(name.into(), value.clone()),
            None => taken.remove(name),
        };
    }
    let model: ModelConfig = toml::Value::Table(taken)
        .try_into()
        .expect("each value was one of a model's before");
    model.validate().map_err(ConfigError::from)?;
    resolved.config.model = model;
    check::contradictions(&resolved.config)?;
    Ok(())
}

/// What is said of a run that goes on has the chunk of the output head that the run keeps, where that is left to a choice.
/// Without such a run, it would be about another one. Training looks for itself, with all ranks and checksums
/// (`train/resuming.rs`).
fn keep_head_chunk(resolved: &mut Resolved) -> Result<(), Failure> {
    let (options, chunk) = (&resolved.options, &mut resolved.config.memory.head_chunk);
    let (Some(resume), false) = (&options.resume, resolved.task == Task::Train) else {
        return Ok(());
    };
    let Some(file) = resumed_configuration(resume, options.out.as_deref()) else {
        if *resume == Resume::Auto {
            return Ok(());
        }
        return Err(Failure::Usage(
            "--resume names no run with a checkpoint, so there is nothing to plan; name one, or leave it out".into(),
        ));
    };
    if *chunk == AutoOr::Auto {
        let source = Source::open(&file.to_string_lossy())?;
        *chunk = load(&source, &[], false)?.config.memory.head_chunk;
    }
    Ok(())
}

fn print_plan(resolved: &Resolved, args: &PlanArgs) -> Result<(), Failure> {
    let folder = trace_folder(resolved)?;
    let target = resolved.device().target();
    let config = settled::on_paper(resolved, args.advice.device_bytes()?)?;
    let busy = planning(resolved.options.quiet);
    let mut plan = Plan::with_alternatives(&config, target)?;
    plan.notes.extend(attention::note(&config));
    let mut plan = answer(args, resolved, &config, plan)?;
    // What budgets buy is chosen for each anew.
    let open = Config {
        recompute: resolved.config.recompute.clone(),
        offload: resolved.config.offload.clone(),
        ..config.clone()
    };
    plan.pareto = args.pareto.answer(&open, target)?;
    drop(busy);
    match resolved.options.json {
        true => print_json(&plan)?,
        false => print(in_words(&plan, resolved))?,
    }
    args.pareto.draw(&plan)?;
    match folder {
        Some(folder) => draw_plan(folder, resolved, &config),
        None => Ok(()),
    }
}

/// The plan, and what was asked for beside it.
fn in_words(plan: &Plan, resolved: &Resolved) -> String {
    let verdict = verdict(resolved, plan.most_bytes());
    let pareto = plan.pareto.as_ref().map(pareto::tables);
    let largest = plan.largest.as_ref().map(|largest| format!("\n{largest}"));
    let advice = plan.advice.as_ref().map(ToString::to_string);
    let asked = [pareto, largest, advice].into_iter().flatten();
    format!("{plan}{verdict}{}", asked.collect::<String>())
}

/// Whether the plan's peak fits a limit in bytes; a share of a device that is not there says nothing.
fn verdict(resolved: &Resolved, peak_bytes: u64) -> String {
    match resolved.config.memory.limit {
        Some(Size::Bytes(limit)) => {
            let fits = if peak_bytes <= limit {
                "fits"
            } else {
                "does not fit"
            };
            format!(
                "\nthe peak {fits} the limit of {} ({limit} bytes)\n",
                format_bytes(limit)
            )
        }
        _ => String::new(),
    }
}
