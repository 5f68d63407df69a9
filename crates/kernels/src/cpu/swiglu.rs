//! Gated feed-forward activation (Shazeer 2020).

use super::dispatch::by_dtype;
use super::fp8::{ValuesOrCodes, find_largest};
use super::simd::{CHUNK, Real, exp, vectorized};
use crate::operation::{Swiglu, SwigluBackward};
use rayon::prelude::*;

pub(super) fn swiglu(op: Swiglu) {
    by_dtype!(op.gate_up.dtype(), swiglu_of(op));
}

fn swiglu_of<T: Real>(mut op: Swiglu) {
    let width = op.act.dims()[1];
    let act = ValuesOrCodes::<T>::of(op.act.reborrow(), &op.form);
    let rows = rows_of_a_task(width);
    let pieces = op.gate_up.slice::<T>().par_chunks(rows * 2 * width);
    pieces.enumerate().for_each(|(piece, gate_up)| {
        let make = |act: &mut [T]| {
            let rows = act.chunks_exact_mut(width);
            for (act, gate_up) in rows.zip(gate_up.chunks_exact(2 * width)) {
                let (gate, up) = gate_up.split_at(width);
                forward(act, gate, up);
            }
        };
        // SAFETY: rows of a piece of gate_up belong to its task alone.
        unsafe { act.make(piece * rows * width, gate_up.len() / 2, make) };
    });
    find_largest(op.form, op.act.as_in());
}

pub(super) fn swiglu_backward(mut op: SwigluBackward) {
    let (width, out) = (op.dact.dims()[1], op.gate_up.reborrow());
    by_dtype!(
        out.dtype(),
        swiglu_backward_of(out.slice_mut(), op.dact.slice(), width)
    );
    find_largest(op.largest, op.gate_up.as_in());
}

fn swiglu_backward_of<T: Real>(gate_up: &mut [T], dact: &[T], width: usize) {
    let rows = rows_of_a_task(width);
    let tasks = gate_up.par_chunks_mut(rows * 2 * width);
    let tasks = tasks.zip(dact.par_chunks(rows * width));
    tasks.for_each(|(gate_up, dact)| {
        let rows = gate_up.chunks_exact_mut(2 * width);
        for (gate_up, dact) in rows.zip(dact.chunks_exact(width)) {
            let (gate, up) = gate_up.split_at_mut(width);
            backward(gate, up, dact);
        }
    });
}

fn rows_of_a_task(width: usize) -> usize {
    (CHUNK / width).max(1)
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
