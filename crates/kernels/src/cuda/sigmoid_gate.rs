//! The gate on the output of attention (Qiu et al. 2025).

use super::extent::Extent;
use super::{Cuda, Driver, arguments, kernel};
use crate::Result;
use crate::operation::{SigmoidGate, SigmoidGateBackward};

pub(super) fn sigmoid_gate<D: Driver>(cuda: &Cuda<D>, op: SigmoidGate) -> Result {
    let kernel = kernel!("sigmoid_gate", "sigmoid_gate", op.x.dtype());
    let n = op.x.elements();
    let arguments = arguments![&op.out, &op.x, &op.gate, n];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn sigmoid_gate_backward<D: Driver>(cuda: &Cuda<D>, op: SigmoidGateBackward) -> Result {
    let kernel = kernel!("sigmoid_gate", "sigmoid_gate_backward", op.x.dtype());
    let n = op.x.elements();
    let arguments = arguments![&op.dx, &op.dgate, &op.dout, &op.x, &op.gate, n];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}
