//! Chooses what a configuration leaves open, in a fixed order: how documents become rows; the data's sequence length; attention, while no device
//! is open, because trying cuDNN opens it; the micro-batches of evaluations; the chunk of the output head; and last
//! recompute, which depends on all of these.

use crate::attention::choose_attention;
use crate::device::OpenDevice;
use crate::failure::Failure;
use crate::samples::{data_options, decide_packing, fit_evaluation};
use collectives::Group;
use data::Dataset;
use kernels::Target;
use planner::{ChosenHeadChunk, choose};
use report::Busy;
use settings::{AutoOr, Config, Device, Resolved, Size, Task};
use std::sync::Arc;

/// The measured memory of an engine is rounded up to a multiple of this.
const ENGINE_ROUNDING: u64 = 64 << 20;

/// The run's configuration with everything decided, and its device, opened for a rank if there is a group.
///
/// # Errors
/// [`Failure`]: the data or the device cannot be opened, or nothing can be chosen.
pub(crate) fn on_device(
    resolved: &Resolved,
    group: Option<Arc<dyn Group>>,
) -> Result<(Config, OpenDevice), Failure> {
    let mut before = without_device(resolved)?;
    let engine = group.as_deref().and_then(|group| group.on_device());
    // Rounded, so that choices do not differ between runs.
    let engine = engine.map(|engine| engine.device_bytes().next_multiple_of(ENGINE_ROUNDING));
    before.0.engine_bytes = engine;
    let device = OpenDevice::in_group(resolved.device(), group)?;
    let config = for_holder(resolved, before, Holder::Device(&device))?;
    Ok((config, device))
}

/// The same for a device of `device_bytes`, which need not exist. `None`: of any size.
///
/// # Errors
/// As [`on_device`].
pub(crate) fn on_paper(resolved: &Resolved, device_bytes: Option<u64>) -> Result<Config, Failure> {
    let before = without_device(resolved)?;
    for_holder(resolved, before, Holder::Paper(device_bytes))
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
fn without_device(resolved: &Resolved) -> Result<(Config, Option<String>), Failure> {
    let resolved = &mut resolved.clone();
    decide_packing(resolved);
    let options = data_options(resolved);
    let seq = match options.seq {
        Some(seq) => seq,
        None => Dataset::open(&options)?.seq(),
    };
    let mut config = resolved.decided(seq);
    let attention = choose_attention(resolved.task, &mut config)?;
    fit_evaluation(resolved, &mut config);
    Ok((config, attention))
}

/// Decides the chunk of the output head, and the recompute policy.
fn for_holder(
    resolved: &Resolved,
    (mut config, attention): (Config, Option<String>),
    holder: Holder,
) -> Result<Config, Failure> {
    if let Some(attention) = attention {
        holder.tell(&attention);
    }
    let target = resolved.device().target();
    // With several ranks, which may share a terminal, only the first one reports.
    let quiet = resolved.options.quiet || config.rank.is_some_and(|rank| rank.number > 0);
    let budget = match config.chooses() {
        true => Some(budget(resolved, holder)?),
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
    let Some(budget) = budget else {
        return Ok(config);
    };
    tracing::info!("recompute auto: comparing policies on paper");
    let busy = planning(quiet);
    let choice = choose(&config, target, budget)?;
    drop(busy);
    tracing::info!("{}", choice.describe());
    Ok(choice.applied_to(&config))
}

/// The most that the peak may be: the budget or the limit, whichever is smaller.
fn budget(resolved: &Resolved, holder: Holder) -> Result<u64, Failure> {
    let memory = &resolved.config.memory;
    let sizes = [memory.budget, memory.limit].into_iter().flatten();
    let bytes = sizes.map(|size| bytes_of(size, resolved, holder));
    let bytes = bytes.collect::<Result<Vec<_>, Failure>>()?;
    let least = bytes.into_iter().min();
    Ok(least.expect("a configuration that asks for a choice has one of both"))
}

fn bytes_of(size: Size, resolved: &Resolved, holder: Holder) -> Result<u64, Failure> {
    let Size::Percent(_) = size else {
        return Ok(size.bytes_of(0));
    };
    if let (Task::Plan, Device::Cuda { .. }) = (resolved.task, resolved.device()) {
        return Err(Failure::Usage(
            "a plan does not ask the device, so a share of its memory is not known; write --memory-budget in bytes, such as \
             60GiB"
                .into(),
        ));
    }
    let total = match holder {
        Holder::Device(device) => device.total_bytes()?,
        Holder::Paper(Some(bytes)) => bytes,
        Holder::Paper(None) => OpenDevice::open(resolved.device())?.total_bytes()?,
    };
    Ok(size.bytes_of(total))
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
