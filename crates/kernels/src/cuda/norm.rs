//! Sums over whole arenas.

use super::extent::{Extent, WARP};
use super::{Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{NormAndClip, NormGrains, Sum};
use memory::DType;

/// Threads of the block that sums losses.
const SUM_THREADS: usize = 512;

/// Threads of the block that sums grains. They are the lanes of that sum, on the CPU too.
const NORM_THREADS: usize = 1024;

pub(super) fn sum<D: Driver>(cuda: &Cuda<D>, Sum { out, x, init }: Sum) -> Result<(), KernelError> {
    let extent = Extent {
        grid: [1, 1, 1],
        block: [SUM_THREADS, 1, 1],
        shared_bytes: 0,
    };
    let arguments = [
        (&out).into(),
        (&x).into(),
        x.elements().into(),
        accumulates(&init),
    ];
    cuda.launch(kernel!("norm", "sum_f32"), extent, &arguments)
}

pub(super) fn norm_grains<D: Driver>(
    cuda: &Cuda<D>,
    NormGrains { grains, x }: NormGrains,
) -> Result<(), KernelError> {
    // One warp per grain.
    let extent = Extent::lanes(grains.elements(), WARP);
    let kernel = kernel!("norm", "norm_grains", x.dtype());
    let arguments = [(&grains).into(), (&x).into(), x.elements().into()];
    cuda.launch(kernel, extent, &arguments)
}

pub(super) fn norm_and_clip<D: Driver>(
    cuda: &Cuda<D>,
    operation: NormAndClip,
) -> Result<(), KernelError> {
    let NormAndClip {
        out,
        grains,
        loss,
        max_norm,
    } = operation;
    let extent = Extent {
        grid: [1, 1, 1],
        block: [NORM_THREADS, 1, 1],
        shared_bytes: 0,
    };
    let max_norm = max_norm.unwrap_or(f32::INFINITY);
    let arguments = [
        (&out).into(),
        (&grains).into(),
        grains.elements().into(),
        (&loss).into(),
        max_norm.into(),
    ];
    cuda.launch(kernel!("norm", "norm_and_clip_f32"), extent, &arguments)
}
