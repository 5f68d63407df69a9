//! Muon's momentum update, the sums of Newton-Schulz's iteration, and the update of the weights.

use super::adamw::{beside, by_moment, by_weights, in_rounds, moment};
use super::extent::Extent;
use super::{Cuda, Driver, arguments, kernel};
use crate::operation::{Combine, DivideByNorm, Momentum, StepAlong};
use crate::{MasterOperand, MomentOperand, Result};
use memory::DType;

pub(super) fn momentum<D: Driver>(cuda: &Cuda<D>, op: Momentum) -> Result {
    let (out, gradients, n) = (op.out.dtype(), op.gradients.dtype(), op.out.elements());
    let kernel = by_moment!(&op.momentum, "muon", "momentum_", out, gradients);
    let (values, absmax) = moment(&op.momentum);
    let arguments = arguments! {
        &op.out, values, absmax, &op.gradients, &op.clip, &op.key, op.first_index as usize,
        op.decay, op.nesterov, n,
    };
    cuda.launch(kernel, in_rounds(n), &arguments)
}

pub(super) fn divide_by_norm<D: Driver>(cuda: &Cuda<D>, op: DivideByNorm) -> Result {
    let kernel = kernel!("muon", "divide_by_norm", op.x.dtype());
    let n = op.x.elements();
    let arguments = arguments![&op.x, &op.norm, op.eps, n];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn combine<D: Driver>(cuda: &Cuda<D>, op: Combine) -> Result {
    let kernel = kernel!("muon", "combine", op.out.dtype());
    let n = op.out.elements();
    let arguments = arguments![&op.out, &op.x, op.alpha, op.beta, n];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn step_along<D: Driver>(cuda: &Cuda<D>, op: StepAlong) -> Result {
    let (n, direction) = (op.parameters.elements(), op.direction.dtype());
    let kernel = by_weights!(op, "muon", "step_along_", direction);
    let arguments = arguments! {
        &op.parameters, beside(&op.master), &op.direction, &op.rate, &op.clip, &op.key,
        op.first_index as usize, op.scale, op.weight_decay, n,
    };
    cuda.launch(kernel, in_rounds(n), &arguments)
}
