//! What `auto` stands for, settled before anything else is made of a configuration: the chunk of the output head, then what is
//! recomputed. Attention is settled before that (`attention.rs`), when no device is open yet.

use crate::device::OpenDevice;
use crate::failure::Failure;
use kernels::Target;
use planner::{ChosenHeadChunk, Room, choose};
use settings::{Config, Device, HeadChunk, Resolved, Size, Task};

/// What is known of the memory that has to hold a run.
#[derive(Clone, Copy)]
pub(crate) enum Holder<'a> {
    /// The run's own device.
    Device(&'a OpenDevice),
    /// A device of so many bytes, which is not there.
    Bytes(u64),
    /// Nothing.
    Unknown,
}

/// The configuration with a number and a policy written out where it asks for a choice; what was chosen is logged.
pub(crate) fn chosen(
    resolved: &Resolved,
    mut config: Config,
    holder: Holder,
) -> Result<Config, Failure> {
    let budget = match config.chooses() {
        true => Some(budget(resolved, holder)?),
        false => None,
    };
    if config.memory.head_chunk == HeadChunk::Auto {
        let tokens = head_chunk(resolved, &config, holder, budget)?;
        config.memory.head_chunk = HeadChunk::Tokens(tokens);
    }
    let Some(budget) = budget else {
        return Ok(config);
    };
    tracing::info!("recompute auto: comparing policies on paper");
    let choice = choose(&config, resolved.device().target(), budget)?;
    tracing::info!("{}", choice.describe());
    Ok(choice.applied_to(&config))
}

/// Tokens of a chunk of the output head.
fn head_chunk(
    resolved: &Resolved,
    config: &Config,
    holder: Holder,
    budget: Option<u64>,
) -> Result<usize, Failure> {
    let target = resolved.device().target();
    let rooms = match target {
        Target::Cpu => Vec::new(),
        Target::Cuda => rooms(holder)?,
    };
    let chosen = ChosenHeadChunk::new(config, target, &rooms, budget)?;
    match (chosen.describe(), resolved.task) {
        // A plan says which chunk it is for.
        (Some(choice), Task::Plan) => tracing::debug!("{choice}"),
        (Some(choice), _) => tracing::info!("{choice}"),
        (None, _) => {}
    }
    Ok(chosen.tokens)
}

/// What a plan has to fit: what holds the run. Not `memory.limit`, which acts at leases alone: a run has the same plan with it
/// and without.
fn rooms(holder: Holder) -> Result<Vec<Room>, Failure> {
    Ok(match holder {
        // All of it, whoever else has some of it now: the choice is the same from run to run.
        Holder::Device(device) => vec![Room::Device(device.total_bytes()?)],
        Holder::Bytes(bytes) => vec![Room::Device(bytes)],
        Holder::Unknown => Vec::new(),
    })
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
        Holder::Bytes(bytes) => bytes,
        Holder::Unknown => OpenDevice::open(resolved.device())?.total_bytes()?,
    };
    Ok(size.bytes_of(total))
}
