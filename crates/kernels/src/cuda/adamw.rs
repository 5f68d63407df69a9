//! AdamW on ranges, for every format of its states.

use super::extent::{Extent, WARP};
use super::{Argument, Cuda, Driver, arguments};
use crate::quantise::BLOCK;
use crate::{AdamW, MasterOperand, MomentOperand, Result};
use memory::DType;

/// Threads of a block, and blocks of 256 elements that each of its warps updates: as in `states.cuh`.
const THREADS: usize = 256;
const ROUNDS: usize = 8;

/// Blocks of threads for an update of `n` elements.
pub(super) fn in_rounds(n: usize) -> Extent {
    Extent::new(
        [n.div_ceil(THREADS / WARP * BLOCK * ROUNDS), 1, 1],
        [THREADS, 1, 1],
    )
}

pub(super) fn adamw<D: Driver>(cuda: &Cuda<D>, op: AdamW) -> Result {
    let n = op.parameters.elements();
    let gradients = op.gradients.dtype();
    let kernel = match (op.parameters.dtype(), &op.master) {
        (DType::F32, _) => by_moment!(op.first_moment, "adamw", "adamw_f32_", gradients),
        (_, MasterOperand::F32(_)) => {
            by_moment!(op.first_moment, "adamw", "adamw_master_", gradients)
        }
        (_, MasterOperand::Remainder(_)) => {
            by_moment!(op.first_moment, "adamw", "adamw_split_", gradients)
        }
        (_, MasterOperand::Parameters) => {
            by_moment!(op.first_moment, "adamw", "adamw_rounded_", gradients)
        }
    };
    let (first, first_absmax) = moment(&op.first_moment);
    let (second, second_absmax) = moment(&op.second_moment);
    let arguments = arguments! {
        &op.parameters, beside(&op.master), first, second, first_absmax, second_absmax,
        &op.gradients, &op.rates, &op.clip, &op.key, op.first_index as usize, op.beta1, op.beta2,
        op.eps, op.weight_decay, n,
    };
    cuda.launch(kernel, in_rounds(n), &arguments)
}

/// A moment, and the `absmax` of its codes.
pub(super) fn moment(moment: &MomentOperand) -> (Argument, Argument) {
    match moment {
        MomentOperand::Plain(moment) => (moment.into(), Argument::NULL),
        MomentOperand::Quantised { codes, absmax } => (codes.into(), absmax.into()),
    }
}

/// The tensor of the exact weights: a master, a remainder, or none.
pub(super) fn beside(master: &MasterOperand) -> Argument {
    match master {
        MasterOperand::Parameters => Argument::NULL,
        MasterOperand::F32(beside) | MasterOperand::Remainder(beside) => beside.into(),
    }
}

/// The kernel for the format of a moment, by the beginning of its name.
macro_rules! by_moment {
    ($moment:expr, $source:literal, $start:literal, $($dtype:expr),+) => {
        match &$moment {
            $crate::MomentOperand::Plain(moment) if moment.dtype() == memory::DType::F32 => {
                $crate::cuda::kernel!($source, concat!($start, "f32"), $($dtype),+)
            }
            $crate::MomentOperand::Plain(_) => $crate::cuda::kernel!($source, concat!($start, "bf16"), $($dtype),+),
            $crate::MomentOperand::Quantised { .. } => $crate::cuda::kernel!($source, concat!($start, "8bit"), $($dtype),+),
        }
    };
}
pub(super) use by_moment;

/// The kernel for the form of an operation's weights, by the beginning of its name.
macro_rules! by_weights {
    ($op:expr, $source:literal, $start:literal $(, $dtype:expr)?) => {
        match ($op.parameters.dtype(), &$op.master) {
            (memory::DType::F32, _) => $crate::cuda::kernel!($source, concat!($start, "f32") $(, $dtype)?),
            (_, $crate::MasterOperand::F32(_)) => $crate::cuda::kernel!($source, concat!($start, "master") $(, $dtype)?),
            (_, $crate::MasterOperand::Remainder(_)) => $crate::cuda::kernel!($source, concat!($start, "split") $(, $dtype)?),
            (_, $crate::MasterOperand::Parameters) => $crate::cuda::kernel!($source, concat!($start, "rounded") $(, $dtype)?),
        }
    };
}
pub(super) use by_weights;
