//! The gate on the output of attention (Qiu et al. 2025).

use super::dispatch::by_dtype;
use super::simd::{CHUNK, Real, exp, vectorized};
use crate::operation::{SigmoidGate, SigmoidGateBackward};
use rayon::prelude::*;

pub(super) fn sigmoid_gate(op: SigmoidGate) {
    by_dtype!(op.x.dtype(), gate_of(op));
}

fn gate_of<T: Real>(op: SigmoidGate) {
    let [x, gate] = [op.x, op.gate].map(|of| of.slice::<T>().par_chunks(CHUNK));
    let out = op.out.slice_mut().par_chunks_mut(CHUNK);
    out.zip(x.zip(gate))
        .for_each(|(out, (x, gate))| forward(out, x, gate));
}

pub(super) fn sigmoid_gate_backward(op: SigmoidGateBackward) {
    by_dtype!(op.x.dtype(), gradients_of(op));
}

fn gradients_of<T: Real>(op: SigmoidGateBackward) {
    let [dx, dgate] = [op.dx, op.dgate].map(|of| of.slice_mut::<T>().par_chunks_mut(CHUNK));
    let [dout, x, gate] = [op.dout, op.x, op.gate].map(|of| of.slice::<T>().par_chunks(CHUNK));
    dx.zip(dgate)
        .zip(dout.zip(x.zip(gate)))
        .for_each(|((dx, dgate), (dout, (x, gate)))| backward([dx, dgate], dout, x, gate));
}

vectorized! {
    fn forward<T: Real>(out: &mut [T], x: &[T], gate: &[T]) {
        for (out, (x, gate)) in out.iter_mut().zip(x.iter().zip(gate)) {
            *out = T::narrow(x.widen() / (1.0 + exp(-gate.widen())));
        }
    }

    fn backward<T: Real>(into: [&mut [T]; 2], dout: &[T], x: &[T], gate: &[T]) {
        let [dx, dgate] = into;
        let into = dx.iter_mut().zip(dgate.iter_mut());
        for ((dx, dgate), (dout, (x, gate))) in into.zip(dout.iter().zip(x.iter().zip(gate))) {
            let (d, sigmoid) = (dout.widen(), 1.0 / (1.0 + exp(-gate.widen())));
            *dx = T::narrow(d * sigmoid);
            *dgate = T::narrow(d * x.widen() * sigmoid * (1.0 - sigmoid));
        }
    }
}
