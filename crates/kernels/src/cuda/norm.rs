//! Sums over whole arenas.

use super::extent::Extent;
use super::{Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::operation::{NormAndClip, Sum};
use crate::{KernelError, NORM_PARTS};
use memory::DType;

/// Parts start at multiples of this, so that each starts as aligned as the whole.
const PART_GRANULARITY: usize = 4096;

/// Threads of a block that sums.
const THREADS: usize = 512;

pub(super) fn sum<D: Driver>(cuda: &Cuda<D>, Sum { out, x, init }: Sum) -> Result<(), KernelError> {
    let extent = Extent {
        grid: [1, 1, 1],
        block: [THREADS, 1, 1],
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

pub(super) fn norm_and_clip<D: Driver>(
    cuda: &Cuda<D>,
    operation: NormAndClip,
) -> Result<(), KernelError> {
    let NormAndClip {
        out,
        parts,
        x,
        loss,
        max_norm,
    } = operation;
    let n = x.elements();
    let part = n.div_ceil(NORM_PARTS).next_multiple_of(PART_GRANULARITY);
    let extent = Extent {
        grid: [NORM_PARTS, 1, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
    };
    let kernel = kernel!("norm", "norm_parts", x.dtype());
    let arguments = [(&parts).into(), (&x).into(), n.into(), part.into()];
    cuda.launch(kernel, extent, &arguments)?;
    let extent = Extent {
        grid: [1, 1, 1],
        block: [NORM_PARTS, 1, 1],
        shared_bytes: 0,
    };
    let max_norm = max_norm.unwrap_or(f32::INFINITY);
    let arguments = [
        (&out).into(),
        (&parts).into(),
        (&loss).into(),
        max_norm.into(),
    ];
    cuda.launch(kernel!("norm", "norm_and_clip_f32"), extent, &arguments)
}
