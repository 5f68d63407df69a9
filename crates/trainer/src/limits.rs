//! What bounds the memory of a run, and what it takes of the host.

use crate::device::OpenDevice;
use crate::failure::Failure;
use kernels::Target;
use planner::{HostNeed, HostRoom, NoDiskRoom, Plan};
use scratch::ScratchFolder;
use settings::{Config, Elsewhere, Resolved, Size, StatesPlace};

/// The limit on live device bytes.
pub(crate) fn limit(resolved: &Resolved, device: &OpenDevice) -> Result<Option<u64>, Failure> {
    Ok(match resolved.config.memory.limit {
        None => None,
        Some(Size::Bytes(bytes)) => Some(bytes),
        Some(size @ Size::Percent(_)) => Some(size.bytes_of(device.total_bytes()?)),
    })
}

/// The limit where it is known without a device: one in bytes.
pub(crate) fn limit_of_plan(resolved: &Resolved) -> Option<u64> {
    match resolved.config.memory.limit {
        Some(Size::Bytes(bytes)) => Some(bytes),
        _ => None,
    }
}

/// Refuses a run that the host or a disk has no room for, unless it is forced.
pub(crate) fn refuse_without_room(
    config: &Config,
    plan: &Plan,
    target: Target,
    limit: Option<u64>,
) -> Result<(), Failure> {
    if config.memory.force {
        return Ok(());
    }
    HostRoom::ask().check(host_need(plan, target, limit))?;
    if let StatesPlace::Disk(folder) = Elsewhere::of(config)?.states {
        NoDiskRoom::check(&folder, plan.disk_bytes)?;
        // Taken and given back: a folder that cannot be used is told before anything is loaded or written.
        drop(ScratchFolder::open(folder)?);
    }
    Ok(())
}

/// Host memory that a run takes. Under a limit, leases beyond that are refused: they take none.
fn host_need(plan: &Plan, target: Target, limit: Option<u64>) -> HostNeed {
    match target {
        Target::Cuda => HostNeed::Pinned(plan.host_pinned_bytes),
        Target::Cpu => {
            let leased = plan.reserved_bytes.min(limit.unwrap_or(u64::MAX));
            HostNeed::Everything(plan.host_pinned_bytes.saturating_add(leased))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;
    use settings::Settings;

    const GIB: u64 = 1 << 30;

    /// A GPU's run needs host memory for what is pinned, the processor's for everything that it may lease.
    #[test]
    fn what_a_run_needs_of_the_host() {
        let flags = "trainer plan --device cpu --offload-optimizer pinned";
        let cli = Cli::try_parse_from(flags.split(' ')).unwrap();
        let settings = Settings::new(&cli.resolve().unwrap().decided(32)).unwrap();
        let plan = Plan::new(&settings, Target::Cpu).unwrap();
        let (pinned, reserved) = (plan.host_pinned_bytes, plan.reserved_bytes);
        assert!(pinned > 0 && reserved > pinned);
        let need = |target, limit| host_need(&plan, target, limit);
        assert_eq!(need(Target::Cuda, None), HostNeed::Pinned(pinned));
        for (limit, leased) in [(None, reserved), (Some(GIB), reserved), (Some(256), 256)] {
            let everything = HostNeed::Everything(pinned + leased);
            assert_eq!(need(Target::Cpu, limit), everything);
        }
    }
}
