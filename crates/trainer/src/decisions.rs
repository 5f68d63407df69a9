//! Chooses what a configuration leaves open, in a fixed order: how documents become rows; the data's sequence length; attention;
//! the micro-batches of evaluations; the chunk of the output head; and last recompute, which depends on all of these.

use crate::device::OpenDevice;
use crate::failure::{Failure, Result};
use crate::kernel_kinds::KernelKinds;
use crate::samples::{data_options, evaluation_rows, steps};
use collectives::Group;
use data::{Dataset, Inputs};
use kernels::Target;
use kernels::cuda::KernelKind;
use planner::{
    AutoError, Choice, ChosenHeadChunk, OomReport, Plan, as_fullest_rank, choose, name_head_chunks,
    overhead_bytes,
};
use report::Busy;
use session::SessionError;
use settings::{
    AttentionBackend, AutoOr, Completed, Config, Device, HEURISTIC, KernelFamily, OptimizerPlace,
    PerFamily, Resolved, Settings, Size, Task, auto_attention,
};
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

/// The measured memory of an engine is rounded up to a multiple of this.
const ENGINE_ROUNDING: u64 = 64 << 20;

/// A command whose configuration leaves nothing open, so that it gives the same run wherever it is written down. Plans and `init` keep
/// `auto` attention, and plans the steps of `--epochs`.
#[derive(Clone, Debug)]
pub(crate) struct Decided(Resolved);

impl Deref for Decided {
    type Target = Resolved;

    fn deref(&self) -> &Resolved {
        &self.0
    }
}

impl Decided {
    /// The same for the rank that needs most memory.
    pub(crate) fn of_fullest_rank(mut self) -> Result<Decided> {
        (self.0.config, _) = as_fullest_rank(self.0.config)?;
        Ok(self)
    }

    /// Makes paths independent of the current folder, because a run may be resumed from another one.
    pub(crate) fn with_whole_paths(mut self) -> Decided {
        let config = &mut self.0.config;
        let states = match &mut config.offload.optimizer {
            OptimizerPlace::Folder(folder) => Some(folder),
            _ => None,
        };
        let algorithms = &mut config.hardware.algorithms;
        let algorithms = algorithms
            .as_mut()
            .filter(|path| *path != Path::new(HEURISTIC));
        let data = config.data.path.iter_mut().flat_map(Inputs::paths_mut);
        let paths = [
            &mut config.eval.path,
            &mut config.offload.path,
            &mut config.dpo.reference,
        ];
        let paths = paths.into_iter().flatten().chain(data);
        for path in paths.chain(states).chain(algorithms) {
            if let Ok(absolute) = std::path::absolute(&*path) {
                *path = absolute;
            }
        }
        self
    }
}

/// Decides everything, and opens the run's device, for a rank if there is a group. `data` is what the run reads, where it is open: the
/// number of steps follows from it if the length is given in epochs. `before` are the kernels of the run that goes on.
///
/// # Errors
/// [`Failure`]: the data or the device cannot be opened, or nothing can be chosen.
pub(crate) fn on_device(
    command: &Completed,
    data: Option<&Dataset>,
    group: Option<Arc<dyn Group>>,
    before: PerFamily<Option<KernelKind>>,
) -> Result<(Decided, OpenDevice)> {
    let (mut config, attention) = without_device(command, data)?;
    let engine = group.as_deref().and_then(|group| group.on_device());
    // Rounded, so that choices do not differ between runs.
    config.engine_bytes =
        engine.map(|engine| engine.device_bytes().next_multiple_of(ENGINE_ROUNDING));
    // `tune` times no kernels of ours.
    let kinds = match command.task {
        Task::Tune => KernelKinds::default(),
        _ => KernelKinds::decide(&config, before)?,
    };
    let device = OpenDevice::in_group(config.device(), group)?.taking(kinds);
    device.check_attention(&config)?;
    let decided = for_holder(command, config, attention, Holder::Device(&device))?;
    Ok((decided, device))
}

/// The same for a device of `device_bytes`, which need not exist. `None`: of any size.
///
/// # Errors
/// As [`on_device`].
pub(crate) fn on_paper(command: &Completed, device_bytes: Option<u64>) -> Result<Decided> {
    let (config, attention) = without_device(command, None)?;
    for_holder(command, config, attention, Holder::Paper(device_bytes))
}

/// The memory that has to hold a run.
#[derive(Clone, Copy)]
enum Holder<'a> {
    /// The run's own device.
    Device(&'a OpenDevice),
    /// A device of this many bytes, which need not exist; none: of any size.
    Paper(Option<u64>),
}

impl Holder<'_> {
    /// Reports a choice. Plans report it themselves, and so does each of several runs that are planned side by side.
    fn tell(self, choice: &str) {
        match self {
            Holder::Device(_) => tracing::info!("{choice}"),
            Holder::Paper(_) => tracing::debug!("{choice}"),
        }
    }
}

/// The decisions that need no open device, and the chosen attention in words, if one was chosen.
fn without_device(command: &Completed, data: Option<&Dataset>) -> Result<(Config, Option<String>)> {
    let options = data_options(&command.config, command.seq_is_explicit);
    let seq = match (data, options.seq) {
        (Some(data), _) => data.seq(),
        (None, Some(seq)) => seq,
        (None, None) => Dataset::open(&options)?.seq(),
    };
    let mut config = command.decided(seq);
    config.data.packing = options.packing;
    if let Some(data) = data {
        config.train.steps = steps(&config, &command.options, data)?;
    }
    // Plans try other sequence lengths too, for which `auto` may choose another attention.
    let keeps_auto = matches!(command.task, Task::Plan | Task::Init);
    let is_open = config.attention.backend == AttentionBackend::Auto && !keeps_auto;
    let attention = is_open.then(|| {
        let (attention, reason) = auto_attention(&config);
        config.attention.backend = attention.into();
        format!("attention is {}: {reason}", config.attention.backend)
    });
    config.eval.micro_batch = evaluation_rows(&config);
    Ok((config, attention))
}

/// Decides the chunk of the output head, and the recompute policy.
fn for_holder(
    command: &Completed,
    mut config: Config,
    attention: Option<String>,
    holder: Holder,
) -> Result<Decided> {
    if let Some(attention) = attention {
        holder.tell(&attention);
    }
    let target = config.device().target();
    // With several ranks, which may share a terminal, only the first one reports.
    let quiet = command.options.quiet || config.rank.is_some_and(|rank| rank.number > 0);
    let budget = match config.chooses() {
        true => Some(budget(command.task, &config, holder)?),
        false => None,
    };
    if config.memory.head_chunk == AutoOr::Auto {
        // `memory.limit` does not count: it only refuses leases, so that a run has the same plan with and without it.
        let device_bytes = match (target, holder) {
            (Target::Cpu, _) => None,
            // All of its memory, even if others use some now, so that the choice does not differ between runs.
            (Target::Cuda, Holder::Device(device)) => Some(device.total_bytes()?),
            (Target::Cuda, Holder::Paper(bytes)) => bytes,
        };
        let busy = planning(quiet);
        let chosen = ChosenHeadChunk::new(&config, target, device_bytes, budget)?;
        drop(busy);
        if let Some(choice) = chosen.describe() {
            holder.tell(&choice);
        }
        config.memory.head_chunk = AutoOr::Number(chosen.tokens);
    }
    if let Some(budget) = budget {
        tracing::info!("recompute auto: comparing policies on paper");
        let busy = planning(quiet);
        let chosen = policy_within(&timed_by(&config, holder), &config, target, budget);
        drop(busy);
        let (choice, chosen) = chosen.map_err(|error| without_policy(error, &config, command))?;
        tracing::info!("{}", choice.describe());
        config = chosen;
    }
    Ok(Decided(Resolved {
        config,
        ..(**command).clone()
    }))
}

/// The configuration that recompute choices are timed by. With a measured profile it names the kernels that this device takes, so that a
/// profile of other kernels is refused; without, it is the same on all ranks, whatever kernels each may take.
fn timed_by(config: &Config, holder: Holder) -> Config {
    let mut config = config.clone();
    if let (Holder::Device(device), Some(_)) = (holder, &config.recompute.costs) {
        let choices = PerFamily::new(|family: KernelFamily| family.choice(&config));
        let named = device.kernel_kinds().named(choices);
        (config.attention.kernels, config.experts.kernels) = (named.attention, named.experts);
    }
    config
}

/// The policy for a budget by the times of `timed_by`, and the configuration with it. With `--memory-budget auto` the reserved bytes must fit, not
/// only the peak. All ranks choose by the rank that needs most.
fn policy_within(
    timed_by: &Config,
    config: &Config,
    target: Target,
    budget: u64,
) -> Result<(Choice, Config), AutoError> {
    let counts_reserved = config.memory.budget == Some(AutoOr::Auto);
    let mut within = budget;
    loop {
        let choice = choose(timed_by, target, within).map_err(|error| of_budget(error, budget))?;
        let chosen = choice.applied_to(config);
        let reserved = match counts_reserved {
            true => {
                let (_, settings) = as_fullest_rank(chosen.clone())?;
                Plan::new(&settings, target)?.reserved_bytes
            }
            false => choice.peak_bytes,
        };
        if reserved <= budget {
            return Ok((choice, chosen));
        }
        // Reserved bytes exceed the peak because of placement; shrink the budget by the difference.
        within = choice
            .peak_bytes
            .min(within)
            .saturating_sub(reserved - budget);
    }
}

/// A refusal that names the user's budget instead of the lowered one, and what the least policy reserves instead of its peak.
fn of_budget(mut error: AutoError, whole: u64) -> AutoError {
    if let AutoError::Infeasible {
        budget, smallest, ..
    } = &mut error
    {
        *smallest += whole - *budget;
        *budget = whole;
    }
    error
}

/// The failure to find a policy, with what else would fit. A search that fails adds nothing.
fn without_policy(error: AutoError, config: &Config, resolved: &Resolved) -> Failure {
    let AutoError::Infeasible {
        budget, smallest, ..
    } = error
    else {
        return error.into();
    };
    let report = OomReport::of_budget(config, resolved.device().target(), budget);
    let report = report.and_then(|mut report| {
        naming_head_chunk(
            report.iter_mut().flat_map(OomReport::sets),
            config,
            resolved,
        )?;
        Ok(report)
    });
    let memory = &resolved.config.memory;
    let limit = memory.limit.map(AutoOr::Number);
    let bounds = [("budget", memory.budget), ("limit", limit)];
    let raised = bounds.into_iter().filter_map(|(name, size)| match size {
        Some(AutoOr::Number(Size::Bytes(bytes))) if bytes < smallest => {
            Some(format!("--set memory.{name}={smallest}"))
        }
        _ => None,
    });
    let raised: Vec<String> = raised.collect();
    let mut hints = Vec::new();
    if !raised.is_empty() {
        let raised = raised.join(" ");
        hints.push(format!("{raised} is the least that a policy is within"));
    }
    if let Ok(Some(report)) = report {
        hints.extend(report.hints());
    }
    Failure::DoesNotFit {
        reason: error.to_string(),
        hints,
    }
}

/// Makes settings name the chunk of the output head that they were planned with, where the run leaves it open and would choose another
/// with them.
pub(crate) fn naming_head_chunk<'a>(
    sets: impl IntoIterator<Item = &'a mut Vec<String>>,
    config: &Config,
    resolved: &Resolved,
) -> Result<(), SessionError> {
    match resolved.chooses_head_chunk {
        true => name_head_chunks(config, resolved.device().target(), sets),
        false => Ok(()),
    }
}

/// The most that the peak may be: the budget or the limit, whichever is smaller.
fn budget(task: Task, config: &Config, holder: Holder) -> Result<u64> {
    let limit = config.memory.limit.map(AutoOr::Number);
    let sizes = [config.memory.budget, limit].into_iter().flatten();
    let bytes = sizes.map(|size| bytes_of(size, task, config, holder));
    let bytes = bytes.collect::<Result<Vec<_>>>()?;
    let least = bytes.into_iter().min();
    Ok(least.expect("a configuration that asks for a choice has one of both"))
}

/// A budget in bytes. A share and `auto` are of the device's memory.
fn bytes_of(size: AutoOr<Size>, task: Task, config: &Config, holder: Holder) -> Result<u64> {
    if let AutoOr::Number(size @ Size::Bytes(_)) = size {
        return Ok(size.bytes_of(0));
    }
    let opened;
    let device = match holder {
        Holder::Paper(Some(bytes)) => {
            // What ranks exchange takes memory, whatever is recomputed.
            let default = Config::default();
            let plain = Config {
                recompute: default.recompute,
                offload: default.offload,
                ..config.clone()
            };
            let beside = overhead_bytes(config.device().target(), &Settings::new(&plain)?);
            return Ok(match size {
                AutoOr::Auto => bytes.saturating_sub(beside),
                AutoOr::Number(size) => size.bytes_of(bytes),
            });
        }
        Holder::Paper(None) if task == Task::Plan && config.device() != Device::Cpu => {
            return Err(Failure::Usage(
                "a plan does not ask the device, so its memory is not known, and neither what is free of it nor a share; add \
                 --device-memory SIZE|NAME, or write --memory-budget in bytes, such as 60GiB"
                    .into(),
            ));
        }
        Holder::Paper(None) => {
            opened = OpenDevice::open(config.device())?;
            &opened
        }
        Holder::Device(device) => device,
    };
    match size {
        AutoOr::Auto => device.free_bytes(),
        AutoOr::Number(size) => Ok(size.bytes_of(device.total_bytes()?)),
    }
}

/// Shows on a terminal that a plan is being made, with the number of steps on shapes so far, until it is dropped.
pub(crate) fn planning(quiet: bool) -> Busy {
    let steps = || {
        format!(
            "planning: {} steps on shapes so far",
            planner::steps_on_shapes()
        )
    };
    Busy::with(steps, quiet)
}
