//! AdamW on ranges, for every format of its states.

use super::extent::{Extent, WARP};
use super::{Argument, Cuda, Driver, arguments, kernel};
use crate::quantise::BLOCK;
use crate::{AdamW, MasterOperand, MomentOperand, Result};
use memory::DType;

/// Threads of a block, and blocks of 256 elements that each of its warps updates: as in `states.cuh`.
const THREADS: usize = 256;
const ROUNDS: usize = 8;

/// Blocks of threads for an update of `n` elements.
pub(super) fn in_rounds(n: usize) -> Extent {
    let blocks = n.div_ceil(THREADS / WARP * BLOCK * ROUNDS);
    Extent::new([blocks, 1, 1], [THREADS, 1, 1])
}

pub(super) fn adamw<D: Driver>(cuda: &Cuda<D>, op: AdamW) -> Result {
    let n = op.parameters.elements();
    let (state, gradients) = (&op.first_moment, op.gradients.dtype());
    let kernel = match (op.parameters.dtype(), &op.master) {
        (DType::F32, _) => by_moment!(state, "adamw", "adamw_f32_", gradients),
        (_, MasterOperand::F32(_)) => by_moment!(state, "adamw", "adamw_master_", gradients),
        (_, MasterOperand::Remainder(_)) => by_moment!(state, "adamw", "adamw_split_", gradients),
        (_, MasterOperand::RemainderByte(_)) => {
            by_moment!(state, "adamw", "adamw_split24_", gradients)
        }
        (_, MasterOperand::Parameters) => by_moment!(state, "adamw", "adamw_rounded_", gradients),
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
        MasterOperand::F32(beside)
        | MasterOperand::Remainder(beside)
        | MasterOperand::RemainderByte(beside) => beside.into(),
    }
}

/// The kernel for the format of a moment, by the beginning of its name.
macro_rules! by_moment {
    ($moment:expr, $source:literal, $start:literal, $($dtype:expr),+) => {
        match $moment {
            MomentOperand::Plain(moment) if moment.dtype() == DType::F32 => {
                kernel!($source, concat!($start, "f32"), $($dtype),+)
            }
            MomentOperand::Plain(_) => kernel!($source, concat!($start, "bf16"), $($dtype),+),
            MomentOperand::Quantised { .. } => {
                kernel!($source, concat!($start, "8bit"), $($dtype),+)
            }
        }
    };
}
pub(super) use by_moment;

/// The kernel for the form of an operation's weights, by the beginning of its name.
macro_rules! by_weights {
    ($op:expr, $source:literal, $start:literal $(, $dtype:expr)?) => {
        match ($op.parameters.dtype(), &$op.master) {
            (DType::F32, _) => kernel!($source, concat!($start, "f32") $(, $dtype)?),
            (_, MasterOperand::F32(_)) => kernel!($source, concat!($start, "master") $(, $dtype)?),
            (_, MasterOperand::Remainder(_)) => {
                kernel!($source, concat!($start, "split") $(, $dtype)?)
            }
            (_, MasterOperand::RemainderByte(_)) => {
                kernel!($source, concat!($start, "split24") $(, $dtype)?)
            }
            (_, MasterOperand::Parameters) => {
                kernel!($source, concat!($start, "rounded") $(, $dtype)?)
            }
        }
    };
}
pub(super) use by_weights;
