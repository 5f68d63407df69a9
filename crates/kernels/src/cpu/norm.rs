//! Sums over whole arenas.

use super::dispatch::by_dtype;
use super::overwrites;
use super::simd::{Real, vectorized};
use crate::operation::{NormAndClip, NormGrains, Sum};
use memory::GRAIN_ELEMENTS;
use rayon::prelude::*;

/// These set the order of sums, here as in CUDA's kernels: the threads of a warp, and the neighbours that each loads at
/// once.
const WARP: usize = 32;
const PACK: usize = 8;

pub(super) fn sum(Sum { out, x, init }: Sum) {
    let (out, x) = (out.slice_mut::<f32>(), x.slice::<f32>());
    let sum: f64 = x.iter().map(|value| f64::from(*value)).sum();
    out[0] = if overwrites(&init) {
        sum as f32
    } else {
        (f64::from(out[0]) + sum) as f32
    };
}

pub(super) fn norm_grains(NormGrains { grains, x }: NormGrains) {
    let grains = grains.slice_mut();
    by_dtype!(x.dtype(), norm_grains_of(grains, x.slice()));
}

fn norm_grains_of<T: Real>(grains: &mut [f64], x: &[T]) {
    let pieces = grains.par_iter_mut().zip(x.par_chunks(GRAIN_ELEMENTS));
    pieces.for_each(|(grain, x)| *grain = sum_of_squares(x));
}

pub(super) fn norm_and_clip(op: NormAndClip) {
    let (out, loss) = (op.out.slice_mut::<f32>(), op.loss.slice::<f32>()[0]);
    let root = sum_of_grains(op.grains.slice()).sqrt() as f32;
    let norm = match (root * root).is_infinite() {
        true => f32::INFINITY,
        false => root,
    };
    let factor = match op.max_norm {
        _ if !(norm.is_finite() && loss.is_finite()) => f32::NAN,
        Some(max_norm) => (max_norm / (norm + 1e-6)).min(1.0),
        None => 1.0,
    };
    out.copy_from_slice(&[norm, factor]);
}

vectorized! {
    /// The sum of exact squares, in the lanes of a warp whose threads load `PACK` neighbours at a time.
    fn sum_of_squares<T: Real>(x: &[T]) -> f64 {
        let mut lanes = [0.0f64; WARP * PACK];
        let mut add = |row: &[T]| {
            for (lane, value) in lanes.iter_mut().zip(row) {
                let value = f64::from(value.widen());
                *lane += value * value;
            }
        };
        let (rows, rest) = x.as_chunks::<{ WARP * PACK }>();
        rows.iter().for_each(|row| add(row));
        add(rest);
        sum_of_groups::<PACK>(&lanes)
    }

    /// Adds grains in the order of a CUDA block with as many warps as a warp has threads. Each thread loads one grain
    /// at a time.
    pub(super) fn sum_of_grains(grains: &[f64]) -> f64 {
        let mut lanes = [0.0f64; WARP * WARP];
        for row in grains.chunks(lanes.len()) {
            lanes.iter_mut().zip(row).for_each(|(lane, grain)| *lane += grain);
        }
        sum_of_groups::<WARP>(&lanes)
    }
}

/// Adds the lanes of each group, then the groups' sums.
#[inline(always)]
pub(super) fn sum_of_groups<const GROUP: usize>(lanes: &[f64]) -> f64 {
    let (groups, _) = lanes.as_chunks::<GROUP>();
    let groups: [_; WARP] = groups.try_into().expect("a group for each of so many");
    by_halves(groups.map(by_halves))
}

/// Adds the second half of the lanes to the first until one is left, as the threads of a warp do.
#[inline(always)]
fn by_halves<const LANES: usize>(mut lanes: [f64; LANES]) -> f64 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}
