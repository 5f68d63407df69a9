//! Gaussian error linear unit (Hendrycks and Gimpel 2016), in its form with a tanh.

use super::dispatch::by_dtype;
use super::fp8::{ValuesOrCodes, find_largest};
use super::gate::{gelu_share, gelu_slope};
use super::simd::{CHUNK, Real, vectorized};
use crate::operation::{Gelu, GeluBackward};
use rayon::prelude::*;

pub(super) fn gelu(op: Gelu) {
    by_dtype!(op.x.dtype(), gelu_of(op));
}

fn gelu_of<T: Real>(mut op: Gelu) {
    let act = ValuesOrCodes::<T>::of(op.act.reborrow(), &op.form);
    let pieces = op.x.slice::<T>().par_chunks(CHUNK).enumerate();
    pieces.for_each(|(piece, x)| {
        // SAFETY: elements of a piece of x belong to its task alone.
        unsafe { act.make(piece * CHUNK, x.len(), |act| forward(act, x)) };
    });
    find_largest(op.form, op.act.as_in());
}

pub(super) fn gelu_backward(mut op: GeluBackward) {
    let out = op.x.reborrow();
    by_dtype!(
        op.dact.dtype(),
        gelu_backward_of(out.slice_mut(), op.dact.slice())
    );
    find_largest(op.largest, op.x.as_in());
}

fn gelu_backward_of<T: Real>(x: &mut [T], dact: &[T]) {
    x.par_chunks_mut(CHUNK)
        .zip(dact.par_chunks(CHUNK))
        .for_each(|(x, dact)| backward(x, dact));
}

vectorized! {
    fn forward<T: Real>(act: &mut [T], x: &[T]) {
        for (act, x) in act.iter_mut().zip(x) {
            let x = x.widen();
            *act = T::narrow(x * gelu_share(x));
        }
    }

    fn backward<T: Real>(x: &mut [T], dact: &[T]) {
        for (x, dact) in x.iter_mut().zip(dact) {
            let (value, share) = (x.widen(), gelu_share(x.widen()));
            *x = T::narrow(dact.widen() * share * gelu_slope(value, share));
        }
    }
}
