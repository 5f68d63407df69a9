//! The limits on a run's memory, and what the run needs of the host and of disks.

use crate::device::OpenDevice;
#[cfg(feature = "candle")]
use crate::failure::Failure;
use crate::failure::Result;
use files::{TensorSource, tensor_file_bytes};
use kernels::Target;
use memory::Home;
use planner::{
    DiskNeed, HostNeed, HostRoom, InferencePlan, NoDiskRoom, Plan, Saved, SystemDisks,
    first_refused,
};
use scratch::ScratchFolder;
#[cfg(feature = "candle")]
use settings::SampledText;
use settings::{Config, Settings, Size};
use std::path::Path;

/// Raises the limit on open files as far as this process may. A checkpoint of many ranks has a file for each, and all
/// of them are open while it is read. If raising fails, opening the files reports the error.
pub(crate) fn allow_many_files() {
    // SAFETY: a `rlimit` of zeros is valid, and it outlives both calls.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// The limit on live device bytes.
pub(crate) fn limit(config: &Config, device: &OpenDevice) -> Result<Option<u64>> {
    Ok(match config.memory.limit {
        None => None,
        Some(Size::Bytes(bytes)) => Some(bytes),
        Some(size @ Size::Percent(_)) => Some(size.bytes_of(device.total_bytes()?)),
    })
}

/// The limit, if it is known without a device because it is in bytes.
pub(crate) fn limit_of_plan(config: &Config) -> Option<u64> {
    match config.memory.limit {
        Some(Size::Bytes(bytes)) => Some(bytes),
        _ => None,
    }
}

/// Refuses a run if the host or a disk has no room for it, unless it is forced.
pub(crate) fn refuse_without_room(
    config: &Config,
    plan: &Plan,
    target: Target,
    limit: Option<u64>,
) -> Result {
    if config.memory.force {
        return Ok(());
    }
    HostRoom::ask().check(host_need(plan, target, limit))?;
    if let Home::Disk(folder) = config.homes()?.states {
        NoDiskRoom::check(&[states_on_disk(plan, &folder)], &SystemDisks)?;
        // Opened and dropped, so that a folder that cannot be used is reported before anything is loaded or written.
        drop(ScratchFolder::open(folder)?);
    }
    Ok(())
}

/// Refuses a run whose plan does not fit, before anything is leased: at the latest, its first step would fail.
pub(crate) fn refuse_what_does_not_fit(
    (config, settings): (&Config, &Settings),
    plan: &Plan,
    device: &OpenDevice,
    limit: Option<u64>,
) -> Result {
    if config.memory.force {
        return Ok(());
    }
    let planned = (plan.most_bytes(), plan.reserved_bytes);
    let over = limit.filter(|limit| planned.0 > *limit);
    let by_limit = over.map(|limit| first_refused(settings, device.target(), limit));
    let by_device = device.first_refused(settings, planned)?;
    match by_limit.transpose()?.flatten().or(by_device) {
        None => Ok(()),
        Some(error) => Err(error.into()),
    }
}

/// The most texts that are generated together.
#[cfg(feature = "candle")]
const TEXTS_MAX: usize = 1 << 16;

/// Refuses texts that cannot be: the model has positions for `seq` tokens, and the last one of a text is not read.
#[cfg(feature = "candle")]
pub(crate) fn check_sample(SampledText { sequences, tokens }: SampledText, seq: usize) -> Result {
    if (1..=TEXTS_MAX).contains(&sequences) && (1..=seq + 1).contains(&tokens) {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "{sequences} texts of {tokens} tokens are to be generated together; 1 to {TEXTS_MAX} of 1 to {} tokens can be: data.seq says how many \
         the model reads",
        seq + 1
    )))
}

/// The scratch files that a run keeps in a folder.
pub(crate) fn states_on_disk(plan: &Plan, folder: &Path) -> DiskNeed {
    DiskNeed::new(Saved::OptimizerStates, plan.disk_bytes, folder)
}

/// Refuses to write a model with its files if the disk has no room, unless it is forced.
pub(crate) fn refuse_model_without_room(
    out: &Path,
    weights: &dyn TensorSource,
    files: &[(String, Vec<u8>)],
    max_shard_bytes: u64,
    is_forced: bool,
) -> Result {
    let weights = tensor_file_bytes(weights.tensors(), "model", max_shard_bytes);
    let model = DiskNeed::new(Saved::Model, weights + total_bytes(files), out);
    match is_forced {
        true => Ok(()),
        false => Ok(NoDiskRoom::check(&[model], &SystemDisks)?),
    }
}

/// Bytes of small files in memory.
pub(crate) fn total_bytes(files: &[(String, Vec<u8>)]) -> u64 {
    files.iter().map(|(_, bytes)| bytes.len() as u64).sum()
}

/// Host memory that a run needs, including chunks between leases and files, and the packing buffers of the library of
/// matrix products. Leases above a limit are refused, so they need no memory.
fn host_need(plan: &Plan, target: Target, limit: Option<u64>) -> HostNeed {
    match target {
        Target::Cuda => HostNeed::Pinned(plan.host_pinned_bytes),
        Target::Cpu => {
            let leased = plan.reserved_bytes.min(limit.unwrap_or(u64::MAX));
            let leased = plan.host_pinned_bytes.saturating_add(leased);
            let beside = plan.host_beside_bytes() + packing_bytes();
            HostNeed::Everything(leased.saturating_add(beside))
        }
    }
}

fn packing_bytes() -> u64 {
    kernels::cpu::untracked_bytes_max(rayon::current_num_threads())
}

/// Refuses to evaluate or generate if the host has no room for the model, unless it is forced.
pub(crate) fn refuse_inference_without_room(
    config: &Config,
    plan: &InferencePlan,
    target: Target,
) -> Result {
    if target == Target::Cpu && !config.memory.force {
        let need = plan.reserved_bytes + plan.loading_bytes + packing_bytes();
        HostRoom::ask().check(HostNeed::Everything(need))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;
    use files::{Dtype, TensorSpec};
    use settings::Settings;
    use std::io::Write;

    const GIB: u64 = 1 << 30;

    /// A huge tensor, which is never written.
    struct Huge([TensorSpec; 1]);

    impl TensorSource for Huge {
        fn tensors(&self) -> &[TensorSpec] {
            &self.0
        }
        fn write_to(&self, _: usize, _: &mut dyn Write) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_model_is_refused_where_it_has_no_room() {
        let place = tempfile::tempdir().unwrap();
        let model = |bytes: usize| {
            Huge([TensorSpec {
                name: "w".into(),
                dtype: Dtype::U8,
                shape: vec![bytes],
            }])
        };
        let refuse = |model: &Huge, is_forced| {
            refuse_model_without_room(place.path(), model, &[], u64::MAX, is_forced)
        };
        refuse(&model(1), false).unwrap();
        refuse(&model(1 << 60), true).unwrap();
        let refused = refuse(&model(1 << 60), false).unwrap_err();
        assert_eq!(refused.exit_code(), 3);
        assert!(refused.to_string().contains("a model of 1024 PiB"));
        assert!(refused.hints().iter().any(|hint| hint.contains("--force")));
    }

    /// For a GPU, a run needs host memory for pinned leases; on the CPU, for all of its leases.
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
            let beside = plan.host_beside_bytes() + packing_bytes();
            let everything = HostNeed::Everything(pinned + leased + beside);
            assert_eq!(need(Target::Cpu, limit), everything);
        }
    }
}
