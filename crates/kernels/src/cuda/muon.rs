//! Muon's momentum update, the sums of Newton-Schulz's iteration, and the update of the weights.

use super::adamw::{beside, in_rounds, moment};
use super::extent::Extent;
use super::{Cuda, Driver, Kernel, kernel, no_kernel};
use crate::operation::{Combine, DivideByNorm, Momentum, StepAlong};
use crate::{KernelError, MasterOperand, MomentOperand};
use memory::DType;

pub(super) fn momentum<D: Driver>(cuda: &Cuda<D>, operation: Momentum) -> Result<(), KernelError> {
    let n = operation.out.elements();
    let (values, absmax) = moment(&operation.momentum);
    let arguments = [
        (&operation.out).into(),
        values,
        absmax,
        (&operation.gradients).into(),
        (&operation.clip).into(),
        (&operation.key).into(),
        (operation.first_index as usize).into(),
        operation.decay.into(),
        operation.nesterov.into(),
        n.into(),
    ];
    let (out, gradients) = (operation.out.dtype(), operation.gradients.dtype());
    let kernel = match &operation.momentum {
        MomentOperand::Plain(moment) if moment.dtype() == DType::F32 => {
            kernel!("muon", "momentum_f32", out, gradients)
        }
        MomentOperand::Plain(_) => kernel!("muon", "momentum_bf16", out, gradients),
        MomentOperand::Quantised { .. } => kernel!("muon", "momentum_8bit", out, gradients),
    };
    cuda.launch(kernel, in_rounds(n), &arguments)
}

pub(super) fn divide_by_norm<D: Driver>(
    cuda: &Cuda<D>,
    DivideByNorm { x, norm, eps }: DivideByNorm,
) -> Result<(), KernelError> {
    let kernel = kernel!("muon", "divide_by_norm", x.dtype());
    let n = x.elements();
    let arguments = [(&x).into(), (&norm).into(), eps.into(), n.into()];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn combine<D: Driver>(cuda: &Cuda<D>, operation: Combine) -> Result<(), KernelError> {
    let kernel = kernel!("muon", "combine", operation.out.dtype());
    let n = operation.out.elements();
    let arguments = [
        (&operation.out).into(),
        (&operation.x).into(),
        operation.alpha.into(),
        operation.beta.into(),
        n.into(),
    ];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn step_along<D: Driver>(
    cuda: &Cuda<D>,
    operation: StepAlong,
) -> Result<(), KernelError> {
    let n = operation.parameters.elements();
    let arguments = [
        (&operation.parameters).into(),
        beside(&operation.master),
        (&operation.direction).into(),
        (&operation.rate).into(),
        (&operation.clip).into(),
        (&operation.key).into(),
        (operation.first_index as usize).into(),
        operation.scale.into(),
        operation.weight_decay.into(),
        n.into(),
    ];
    let direction = operation.direction.dtype();
    let kernel = match (operation.parameters.dtype(), &operation.master) {
        (DType::F32, _) => kernel!("muon", "step_along_f32", direction),
        (_, MasterOperand::F32(_)) => kernel!("muon", "step_along_master", direction),
        (_, MasterOperand::Remainder(_)) => kernel!("muon", "step_along_split", direction),
        (_, MasterOperand::Parameters) => kernel!("muon", "step_along_rounded", direction),
    };
    cuda.launch(kernel, in_rounds(n), &arguments)
}
