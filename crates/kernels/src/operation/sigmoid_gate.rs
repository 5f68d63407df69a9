//! The gate on the output of attention (Qiu et al. 2025), as Qwen3-Next and Qwen3.5 have it.

use super::contract::Contract;
use super::declaration::operation;
use memory::{In, Out};

operation! {
    /// `out [t, w] = x sigmoid(gate)`, element by element.
    SigmoidGate "sigmoid_gate": x {
        out: Out<'a> [..x],
        x: In<'a> [..x],
        gate: In<'a> [..x],
    }

    /// Gradients of [`SigmoidGate`], which are overwritten: `dx = dout s` and `dgate = dout x s (1 - s)`, with `s = sigmoid(gate)`.
    SigmoidGateBackward "sigmoid_gate_backward": x {
        dx: Out<'a> [..x],
        dgate: Out<'a> [..x],
        dout: In<'a> [..x],
        x: In<'a> [..x],
        gate: In<'a> [..x],
    }
}

impl Contract for SigmoidGate<'_> {}

impl Contract for SigmoidGateBackward<'_> {}
