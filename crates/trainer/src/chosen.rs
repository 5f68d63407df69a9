//! What `--recompute auto` stands for, settled before anything else is made of a configuration.

use crate::attention;
use crate::device::OpenDevice;
use crate::failure::Failure;
use planner::choose;
use settings::{Config, Device, Resolved, Size, Task};

/// The configuration with a policy written out where it asks for a choice, and cuDNN's attention where `auto` stands for that;
/// what was chosen is logged.
pub(crate) fn chosen(resolved: &Resolved, config: Config) -> Result<Config, Failure> {
    let config = attention::chosen(resolved, config)?;
    if !config.chooses() {
        return Ok(config);
    }
    tracing::info!("recompute auto: comparing policies on paper");
    let choice = choose(&config, resolved.device().target(), budget(resolved)?)?;
    tracing::info!("{}", choice.describe());
    Ok(choice.applied_to(&config))
}

/// What the peak may be: the budget and the limit, the smaller where both are given.
fn budget(resolved: &Resolved) -> Result<u64, Failure> {
    let memory = &resolved.config.memory;
    let sizes = [memory.budget, memory.limit].into_iter().flatten();
    let bytes = sizes.map(|size| bytes_of(size, resolved));
    let bytes = bytes.collect::<Result<Vec<_>, Failure>>()?;
    let least = bytes.into_iter().min();
    Ok(least.expect("a configuration that asks for a choice has one of both"))
}

fn bytes_of(size: Size, resolved: &Resolved) -> Result<u64, Failure> {
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
    Ok(size.bytes_of(OpenDevice::open(resolved.device())?.total_bytes()?))
}
