//! Gated feed-forward activation (Shazeer 2020).

use super::dispatch::by_dtype;
use super::fp8::{ValuesOrCodes, find_largest};
use super::gate::{Gate, by_gate};
use super::simd::{CHUNK, Real, vectorized};
use crate::operation::{GatedActivation, GatedActivationBackward};
use rayon::prelude::*;

pub(super) fn gated_activation(op: GatedActivation) {
    by_gate!(op.gate_up.dtype(), op.function, activate(op));
}

fn activate<T: Real>(mut op: GatedActivation, function: impl Gate) {
    let width = op.act.dims()[1];
    let act = ValuesOrCodes::<T>::of(op.act.reborrow(), &op.form);
    let rows = rows_of_a_task(width);
    let pieces = op.gate_up.slice::<T>().par_chunks(rows * 2 * width);
    pieces.enumerate().for_each(|(piece, gate_up)| {
        let make = |act: &mut [T]| {
            let rows = act.chunks_exact_mut(width);
            for (act, gate_up) in rows.zip(gate_up.chunks_exact(2 * width)) {
                let (gate, up) = gate_up.split_at(width);
                forward(act, gate, up, function);
            }
        };
        // SAFETY: rows of a piece of gate_up belong to its task alone.
        unsafe { act.make(piece * rows * width, gate_up.len() / 2, make) };
    });
    find_largest(op.form, op.act.as_in());
}

pub(super) fn gated_activation_backward(mut op: GatedActivationBackward) {
    let (width, out) = (op.dact.dims()[1], op.gate_up.reborrow());
    by_gate!(
        out.dtype(),
        op.function,
        gradients(out.slice_mut(), op.dact.slice(), width)
    );
    find_largest(op.largest, op.gate_up.as_in());
}

fn gradients<T: Real>(gate_up: &mut [T], dact: &[T], width: usize, function: impl Gate) {
    let rows = rows_of_a_task(width);
    let tasks = gate_up.par_chunks_mut(rows * 2 * width);
    let tasks = tasks.zip(dact.par_chunks(rows * width));
    tasks.for_each(|(gate_up, dact)| {
        let rows = gate_up.chunks_exact_mut(2 * width);
        for (gate_up, dact) in rows.zip(dact.chunks_exact(width)) {
            let (gate, up) = gate_up.split_at_mut(width);
            backward(gate, up, dact, function);
        }
    });
}

fn rows_of_a_task(width: usize) -> usize {
    (CHUNK / width).max(1)
}

vectorized! {
    fn forward<T: Real, G: Gate>(act: &mut [T], gate: &[T], up: &[T], function: G) {
        for ((act, gate), up) in act.iter_mut().zip(gate).zip(up) {
            *act = T::narrow(function.act(gate.widen(), up.widen()));
        }
    }

    fn backward<T: Real, G: Gate>(gate: &mut [T], up: &mut [T], dact: &[T], function: G) {
        for ((gate, up), dact) in gate.iter_mut().zip(up).zip(dact) {
            let (of, d) = (function.gated(gate.widen(), up.widen()), dact.widen());
            *gate = T::narrow(d * of.factor * of.slope);
            *up = T::narrow(d * of.passed * of.factor_slope);
        }
    }
}
