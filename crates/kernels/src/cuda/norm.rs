//! Sums over whole arenas.

use super::extent::{Extent, WARP};
use super::{Cuda, Driver, accumulates, arguments, kernel};
use crate::Result;
use crate::operation::{NormAndClip, NormGrains, Sum};

/// Threads of the block that sums losses.
const SUM_THREADS: usize = 512;

/// Threads of the block that sums grains. They are the lanes of that sum, on the CPU too.
const NORM_THREADS: usize = 1024;

pub(super) fn sum<D: Driver>(cuda: &Cuda<D>, Sum { out, x, init }: Sum) -> Result {
    let extent = Extent::new([1, 1, 1], [SUM_THREADS, 1, 1]);
    let arguments = arguments![&out, &x, x.elements(), accumulates(&init)];
    cuda.launch(kernel!("norm", "sum_f32"), extent, &arguments)
}

pub(super) fn norm_grains<D: Driver>(cuda: &Cuda<D>, op: NormGrains) -> Result {
    // One warp per grain.
    let extent = Extent::lanes(op.grains.elements(), WARP);
    let kernel = kernel!("norm", "norm_grains", op.x.dtype());
    let arguments = arguments![&op.grains, &op.x, op.x.elements()];
    cuda.launch(kernel, extent, &arguments)
}

pub(super) fn norm_and_clip<D: Driver>(cuda: &Cuda<D>, op: NormAndClip) -> Result {
    let extent = Extent::new([1, 1, 1], [NORM_THREADS, 1, 1]);
    let max_norm = op.max_norm.unwrap_or(f32::INFINITY);
    let arguments = arguments! { &op.out, &op.grains, op.grains.elements(), &op.loss, max_norm };
    cuda.launch(kernel!("norm", "norm_and_clip_f32"), extent, &arguments)
}
