//! AdamW on ranges, for every format of its states.

use super::calls::Argument;
use super::extent::Extent;
use super::{Cuda, Driver, Kernel, kernel, no_kernel};
use crate::quantise::BLOCK;
use crate::{AdamW, KernelError, MasterOperand, MomentOperand};
use memory::DType;

/// Threads of a block, and blocks of 256 elements that each of its warps updates: as in `states.cuh`.
const THREADS: usize = 256;
const ROUNDS: usize = 8;

const WARP: usize = 32;

/// Blocks of threads for an update of `n` elements.
pub(super) fn in_rounds(n: usize) -> Extent {
    Extent {
        grid: [n.div_ceil(THREADS / WARP * BLOCK * ROUNDS), 1, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
    }
}

pub(super) fn adamw<D: Driver>(cuda: &Cuda<D>, update: AdamW) -> Result<(), KernelError> {
    let n = update.parameters.elements();
    let (first, first_absmax) = moment(&update.first_moment);
    let (second, second_absmax) = moment(&update.second_moment);
    let arguments = [
        (&update.parameters).into(),
        beside(&update.master),
        first,
        second,
        first_absmax,
        second_absmax,
        (&update.gradients).into(),
        (&update.rates).into(),
        (&update.clip).into(),
        (&update.key).into(),
        (update.first_index as usize).into(),
        update.beta1.into(),
        update.beta2.into(),
        update.eps.into(),
        update.weight_decay.into(),
        n.into(),
    ];
    cuda.launch(kernel_of(&update), in_rounds(n), &arguments)
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

/// The kernel for the format of a moment, by its name for f32, bf16 and codes.
macro_rules! by_moment {
    ($update:expr, $f32:literal, $bf16:literal, $codes:literal) => {{
        let gradients = $update.gradients.dtype();
        match &$update.first_moment {
            MomentOperand::Plain(moment) if moment.dtype() == DType::F32 => {
                kernel!("adamw", $f32, gradients)
            }
            MomentOperand::Plain(_) => kernel!("adamw", $bf16, gradients),
            MomentOperand::Quantised { .. } => kernel!("adamw", $codes, gradients),
        }
    }};
}

fn kernel_of(update: &AdamW) -> Kernel {
    match (update.parameters.dtype(), &update.master) {
        (DType::F32, _) => by_moment!(update, "adamw_f32_f32", "adamw_f32_bf16", "adamw_f32_8bit"),
        (_, MasterOperand::F32(_)) => by_moment!(
            update,
            "adamw_master_f32",
            "adamw_master_bf16",
            "adamw_master_8bit"
        ),
        (_, MasterOperand::Remainder(_)) => by_moment!(
            update,
            "adamw_split_f32",
            "adamw_split_bf16",
            "adamw_split_8bit"
        ),
        (_, MasterOperand::Parameters) => by_moment!(
            update,
            "adamw_rounded_f32",
            "adamw_rounded_bf16",
            "adamw_rounded_8bit"
        ),
    }
}
