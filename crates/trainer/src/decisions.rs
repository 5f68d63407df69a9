//! Chooses what a configuration leaves open, in one order: the data's length of sequences; attention, while no
//! device is open, since trying cuDNN opens it; micro-batches of evaluations; the chunk of the output head; and at last what is
//! recomputed, which is chosen for all of these.

use crate::attention::choose_attention;
use crate::device::OpenDevice;
use crate::failure::Failure;
use crate::samples::{data_options, fit_evaluation};
use collectives::Group;
use data::Dataset;
use kernels::Target;
use planner::{ChosenHeadChunk, choose};
use report::Busy;
use settings::{AutoOr, Config, Device, Resolved, Size, Task};
use std::sync::Arc;

/// What the measured memory of an engine is rounded up to.
const ENGINE_ROUNDING: u64 = 64 << 20;

/// The configuration of a run without open questions, and its device: opened for a rank, where there is a group.
///
/// # Errors
/// [`Failure`]: the data or the device cannot be opened, or a choice has no answer.
pub(crate) fn on_device(
    resolved: &Resolved,
    group: Option<Arc<dyn Group>>,
) -> Result<(Config, OpenDevice), Failure> {
    let mut before = without_device(resolved)?;
    let engine = group.as_deref().and_then(|group| group.on_device());
    // Rounded, so that choices are the same from run to run.
    let engine = engine.map(|engine| engine.device_bytes().next_multiple_of(ENGINE_ROUNDING));
    before.0.engine_bytes = engine;
    let device = OpenDevice::in_group(resolved.device(), group)?;
    let config = for_holder(resolved, before, Holder::Device(&device))?;
    Ok((config, device))
}

/// The same for a device of so many bytes, which need not be there; none: of any size.
///
/// # Errors
/// As [`on_device`].
pub(crate) fn on_paper(resolved: &Resolved, device_bytes: Option<u64>) -> Result<Config, Failure> {
    let before = without_device(resolved)?;
    for_holder(resolved, before, Holder::Paper(device_bytes))
}

/// What is known of the memory that has to hold a run.
#[derive(Clone, Copy)]
enum Holder<'a> {
    /// The run's own device.
    Device(&'a OpenDevice),
    /// A device of so many bytes, which is not there; none: of any size.
    Paper(Option<u64>),
}

impl Holder<'_> {
    /// Tells a choice. A plan says itself what it is for, and so does every run of several that are planned side by side.
    fn tell(self, choice: &str) {
        match self {
            Holder::Device(_) => tracing::info!("{choice}"),
            Holder::Paper(_) => tracing::debug!("{choice}"),
        }
    }
}

/// What needs no open device, and which attention was chosen, in words, if one was.
fn without_device(resolved: &Resolved) -> Result<(Config, Option<String>), Failure> {
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

/// The chunk of the output head, and what is recomputed, as numbers and a policy.
fn for_holder(
    resolved: &Resolved,
    (mut config, attention): (Config, Option<String>),
    holder: Holder,
) -> Result<Config, Failure> {
    if let Some(attention) = attention {
        holder.tell(&attention);
    }
    let target = resolved.device().target();
    // Of several ranks, which may share a terminal, the first one tells.
    let quiet = resolved.options.quiet || config.rank.is_some_and(|rank| rank.number > 0);
    let budget = match config.chooses() {
        true => Some(budget(resolved, holder)?),
        false => None,
    };
    if config.memory.head_chunk == AutoOr::Auto {
        // Not `memory.limit`, which acts at leases alone: a run has the same plan with it and without.
        let device_bytes = match (target, holder) {
            (Target::Cpu, _) => None,
            // All of it, whoever else has some of it now: the choice is the same from run to run.
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

/// What the peak may be: the budget and the limit, the smaller where both are given.
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

/// Tells on a terminal that a plan is being made, and of how many steps on shapes, until it is dropped.
pub(crate) fn planning(quiet: bool) -> Busy {
    let steps = || {
        format!(
            "planning: {} steps on shapes so far",
            planner::steps_on_shapes()
        )
    };
    Busy::with(steps, quiet)
}
