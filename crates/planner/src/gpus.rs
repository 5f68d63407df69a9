//! Which GPUs a plan fits.

use collectives::NCCL_CHANNELS;
use kernels::Target;
use memory::format_bytes;
use serde::Serialize;
use settings::Settings;
use std::collections::BTreeMap;

/// What the context, modules and libraries of a CUDA process take besides the plan. PyTorch processes show 400 to 800
/// MiB on an H100; this is an estimate from that range, until it is measured on the device itself.
pub const CUDA_OVERHEAD_BYTES: u64 = 640 << 20;

/// The buffers of a channel between two GPUs, on each of them. An estimate from published measurements of NCCL.
const CHANNEL_BYTES: u64 = 12 << 20;

/// The most GPUs that a machine is expected to have. Each pair has its own channels; GPUs of other machines share
/// buffers.
const GPUS_OF_A_MACHINE: usize = 8;

/// A GPU that plans are made for.
struct Gpu {
    name: &'static str,
    /// Its memory in MiB, as the driver reports it to programs (`cuMemGetInfo`). It is less than `nvidia-smi` shows, because the
    /// driver and error correction keep some. The figures are the lowest in users' reports of PyTorch's out-of-memory errors
    /// ("GPU 0 has a total capacity of 79.10 GiB"): drivers differ by some tens of MiB.
    mib: u64,
    /// The most shared memory of a block, in KiB (CUDA's programming guide, by compute capability).
    block_kib: usize,
}

impl Gpu {
    fn holds(&self, needed_bytes: u64) -> bool {
        needed_bytes <= self.mib << 20
    }
}

const fn gpu(name: &'static str, mib: u64, block_kib: usize) -> Gpu {
    Gpu {
        name,
        mib,
        block_kib,
    }
}

/// The smallest first. `docs/reference/hardware.md` lists them for users.
const GPUS: [Gpu; 9] = [
    gpu("RTX 4090 24GB", 24_084, 99),
    gpu("A100 40GB", 40_335, 163),
    gpu("L40S 48GB", 45_465, 99),
    gpu("H100 80GB", 80_998, HOPPER_BLOCK_KIB),
    gpu("A100 80GB", 81_039, 163),
    gpu("GH200 96GB", 96_768, HOPPER_BLOCK_KIB),
    gpu("RTX PRO 6000 96GB", 97_249, 99),
    gpu("H200 141GB", 143_073, HOPPER_BLOCK_KIB),
    gpu("B200 180GB", 182_630, HOPPER_BLOCK_KIB),
];

/// Hopper's and Blackwell's data-centre GPUs have the most; kernels need no more.
const HOPPER_BLOCK_KIB: usize = 227;

/// Names of the GPUs, the smallest first.
pub(crate) fn names_by_memory() -> impl Iterator<Item = &'static str> {
    GPUS.iter().map(|gpu| gpu.name)
}

/// The memory in bytes of a GPU by a name as people write it: `h100`, `rtx-4090`, `A100 40GB`. The amount may be left
/// out if only one GPU has the name.
///
/// # Errors
/// With a list of all names.
pub fn gpu_memory_bytes(name: &str) -> Result<u64, UnknownGpu> {
    let gpu = named(name).ok_or_else(|| UnknownGpu(name.into()))?;
    Ok(gpu.mib << 20)
}

/// The shared memory that a block may have on a GPU by its name, in bytes: of one that is not known here, that of an H100.
pub fn block_shared_bytes(name: &str) -> usize {
    named(name).map_or(HOPPER_BLOCK_KIB, |gpu| gpu.block_kib) << 10
}

/// The GPU of a name as people write it; none if no GPU or several have it.
fn named(name: &str) -> Option<&'static Gpu> {
    let wanted = plain(name);
    let whole = GPUS.iter().find(|gpu| plain(gpu.name) == wanted);
    let mut models = GPUS.iter().filter(|gpu| plain(model(gpu.name)) == wanted);
    match (whole, models.next(), models.next()) {
        (Some(gpu), ..) | (None, Some(gpu), None) => Some(gpu),
        _ => None,
    }
}

/// A name that no GPU has, or several have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no GPU that is known here, or more than one, is called `{0}`; write one of {names}, or a size such as 80GiB",
    names = short_names().join(", "))]
pub struct UnknownGpu(String);

/// The shortest name of each GPU, as `--device-memory` takes it.
fn short_names() -> Vec<String> {
    let is_alone = |name: &str| {
        GPUS.iter()
            .filter(|gpu| model(gpu.name) == model(name))
            .count()
            == 1
    };
    let names = names_by_memory().map(|name| if is_alone(name) { model(name) } else { name });
    names
        .map(|name| name.to_lowercase().replace(' ', "-"))
        .collect()
}

/// A name without the amount of memory at its end.
fn model(name: &str) -> &str {
    name.rsplit_once(' ').map_or(name, |(model, _)| model)
}

/// Letters and digits of a name, in lower case.
fn plain(name: &str) -> String {
    let letters = name.chars().filter(char::is_ascii_alphanumeric);
    letters.map(|letter| letter.to_ascii_lowercase()).collect()
}

/// Names of the GPUs with at least this much memory. `needed_bytes` includes the overhead.
pub(crate) fn holding(needed_bytes: u64) -> Vec<&'static str> {
    let holding = GPUS.iter().filter(|gpu| gpu.holds(needed_bytes));
    holding.map(|gpu| gpu.name).collect()
}

/// Bytes that a process takes on a target besides the plan.
pub fn overhead_bytes(target: Target, settings: &Settings) -> u64 {
    match target {
        Target::Cpu => 0,
        Target::Cuda => {
            let nccl = NcclMemory::of(settings);
            CUDA_OVERHEAD_BYTES + nccl.map_or(0, |nccl| nccl.bytes)
        }
    }
}

/// What NCCL holds of each GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NcclMemory {
    /// Bytes.
    pub bytes: u64,
    /// Whether the ranks have measured it. Otherwise it is an estimate: channels x peers x 12 MiB.
    pub is_measured: bool,
    /// Channels to each peer, at most.
    pub channels: u32,
    /// Peers to which a rank has channels of its own.
    pub peers: usize,
}

impl NcclMemory {
    /// For ranks with a GPU each; none without ranks.
    pub(crate) fn of(settings: &Settings) -> Option<NcclMemory> {
        let (ranks, measured) = (settings.ranks.as_ref()?, settings.engine_bytes);
        let (channels, peers) = (NCCL_CHANNELS, ranks.of_all().of.min(GPUS_OF_A_MACHINE) - 1);
        let estimate = u64::from(channels) * peers as u64 * CHANNEL_BYTES;
        Some(NcclMemory {
            bytes: measured.unwrap_or(estimate),
            is_measured: measured.is_some(),
            channels,
            peers,
        })
    }

    /// A clause for the end of the sentence that gives the overhead, of which this is a part.
    pub(crate) fn describe(&self) -> String {
        let bytes = format_bytes(self.bytes);
        let NcclMemory {
            channels, peers, ..
        } = self;
        match self.is_measured {
            true => format!(", {bytes} of it NCCL's, as measured"),
            false => format!(
                ", {bytes} of it NCCL's: {channels} channels to each of {peers} peers, {} each",
                format_bytes(CHANNEL_BYTES)
            ),
        }
    }
}

/// For each GPU, whether reserved bytes and overhead fit. Empty for a plan for the CPU.
pub(crate) fn fits(
    target: Target,
    settings: &Settings,
    reserved_bytes: u64,
) -> BTreeMap<&'static str, bool> {
    match target {
        Target::Cpu => BTreeMap::new(),
        Target::Cuda => {
            let needed = reserved_bytes + overhead_bytes(target, settings);
            let fits = GPUS.iter().map(|gpu| (gpu.name, gpu.holds(needed)));
            fits.collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::Rank;

    #[test]
    fn the_smallest_comes_first() {
        assert!(GPUS.is_sorted_by_key(|gpu| gpu.mib));
    }

    #[test]
    fn what_nccl_holds_is_measured_or_estimated_by_channels() {
        let of = |size: usize, engine_bytes: Option<u64>| {
            let mut config = settings::Config::default();
            config
                .join(Rank {
                    number: 0,
                    of: size,
                })
                .unwrap();
            config.engine_bytes = engine_bytes;
            let config = config.with(&["train.seed=1".into()]).unwrap();
            let settings = Settings::new(&config).unwrap();
            [Target::Cpu, Target::Cuda].map(|target| overhead_bytes(target, &settings))
        };
        let mib = |mib: u64| [0, CUDA_OVERHEAD_BYTES + (mib << 20)];
        assert_eq!(of(1, None), mib(0));
        assert_eq!(of(2, None), mib(16 * 12));
        assert_eq!(of(8, None), mib(7 * 16 * 12));
        assert_eq!(
            of(64, None),
            of(8, None),
            "buffers between machines are shared"
        );
        assert_eq!(of(8, Some(900 << 20)), mib(900));
    }

    #[test]
    fn gpus_are_found_by_the_names_that_people_write() {
        let mib = |name: &str| gpu_memory_bytes(name).map(|bytes| bytes >> 20);
        let h100 = ["h100", "H100", "h100-80gb", "H100 80GB", "h100_80GB"];
        assert_eq!(h100.map(mib), [const { Ok(80_998) }; 5]);
        assert_eq!(["rtx-4090", "RTX4090"].map(mib), [const { Ok(24_084) }; 2]);
        assert_eq!(mib("a100-40gb"), Ok(40_335));
        for (short, gpu) in short_names().iter().zip(&GPUS) {
            assert_eq!(mib(short), Ok(gpu.mib), "{short}");
        }
        assert_eq!(block_shared_bytes("rtx-4090"), 99 << 10);
        assert_eq!(block_shared_bytes("24GiB"), 227 << 10);
        for name in ["a100", "100", "h100-96gb", "v100", ""] {
            let refused = mib(name).unwrap_err().to_string();
            let listed = "one of rtx-4090, a100-40gb, l40s, h100, a100-80gb, gh200, rtx-pro-6000, h200, b200, or";
            assert!(refused.contains(listed), "{refused}");
        }
    }
}
