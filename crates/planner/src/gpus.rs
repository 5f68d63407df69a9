//! Which GPUs a plan fits.

use kernels::Target;
use std::collections::BTreeMap;

/// What context, modules and libraries of a CUDA process take beside the plan: an estimate from the range of 400
/// to 800 MiB that PyTorch processes show on an H100, until it is measured on the device itself.
pub const CUDA_OVERHEAD_BYTES: u64 = 640 << 20;

/// Names and memory in MiB, as the driver tells programs (`cuMemGetInfo`); the smallest first. That is less than
/// `nvidia-smi` shows in all, by what the driver and error correction keep. The least that users' reports of PyTorch's
/// out-of-memory errors show for each ("GPU 0 has a total capacity of 79.10 GiB"): drivers differ by some tens of MiB.
const GPUS: [(&str, u64); 9] = [
    ("RTX 4090 24GB", 24_084),
    ("A100 40GB", 40_335),
    ("L40S 48GB", 45_465),
    ("H100 80GB", 80_998),
    ("A100 80GB", 81_039),
    ("GH200 96GB", 96_768),
    ("RTX PRO 6000 96GB", 97_249),
    ("H200 141GB", 143_073),
    ("B200 180GB", 182_630),
];

/// Names of the GPUs, the smallest first.
pub(crate) fn names_by_memory() -> impl Iterator<Item = &'static str> {
    GPUS.into_iter().map(|(name, _)| name)
}

/// Bytes beside the plan on a target.
pub(crate) fn overhead_bytes(target: Target) -> u64 {
    match target {
        Target::Cpu => 0,
        Target::Cuda => CUDA_OVERHEAD_BYTES,
    }
}

/// Whether what is reserved and the overhead fit, by GPU. Nothing for a plan for the CPU.
pub(crate) fn fits(target: Target, reserved_bytes: u64) -> BTreeMap<&'static str, bool> {
    match target {
        Target::Cpu => BTreeMap::new(),
        Target::Cuda => {
            let needed = reserved_bytes + CUDA_OVERHEAD_BYTES;
            GPUS.into_iter()
                .map(|(name, mib)| (name, needed <= mib << 20))
                .collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::GPUS;

    #[test]
    fn the_smallest_comes_first() {
        assert!(GPUS.is_sorted_by_key(|(_, mib)| *mib), "{GPUS:?}");
    }
}
