//! Gated feed-forward activation (Shazeer 2020).

use super::dispatch::by_dtype;
use super::simd::{CHUNK, Real, exp, vectorized};
use crate::operation::{Swiglu, SwigluBackward};
use rayon::prelude::*;

pub(super) fn swiglu(Swiglu { act, gate, up }: Swiglu) {
    by_dtype!(
        act.dtype(),
        swiglu_of(act.slice_mut(), gate.slice(), up.slice())
    );
}

fn swiglu_of<T: Real>(act: &mut [T], gate: &[T], up: &[T]) {
    let inputs = gate.par_chunks(CHUNK).zip(up.par_chunks(CHUNK));
    act.par_chunks_mut(CHUNK)
        .zip(inputs)
        .for_each(|(act, (gate, up))| forward(act, gate, up));
}

pub(super) fn swiglu_backward(SwigluBackward { gate, up, dact }: SwigluBackward) {
    by_dtype!(
        gate.dtype(),
        swiglu_backward_of(gate.slice_mut(), up.slice_mut(), dact.slice())
    );
}

fn swiglu_backward_of<T: Real>(gate: &mut [T], up: &mut [T], dact: &[T]) {
    let outputs = gate.par_chunks_mut(CHUNK).zip(up.par_chunks_mut(CHUNK));
    outputs
        .zip(dact.par_chunks(CHUNK))
        .for_each(|((gate, up), dact)| backward(gate, up, dact));
}

vectorized! {
    fn forward<T: Real>(act: &mut [T], gate: &[T], up: &[T]) {
        for ((act, gate), up) in act.iter_mut().zip(gate).zip(up) {
            let gate = gate.widen();
            *act = T::narrow(gate / (1.0 + exp(-gate)) * up.widen());
        }
    }

    fn backward<T: Real>(gate: &mut [T], up: &mut [T], dact: &[T]) {
        for ((gate, up), dact) in gate.iter_mut().zip(up).zip(dact) {
            let (g, u, d) = (gate.widen(), up.widen(), dact.widen());
            let sigmoid = 1.0 / (1.0 + exp(-g));
            let silu = g * sigmoid;
            *gate = T::narrow(d * u * (sigmoid + silu * (1.0 - sigmoid)));
            *up = T::narrow(d * silu);
        }
    }
}
