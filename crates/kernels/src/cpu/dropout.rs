//! Dropout (Srivastava et al. 2014), alone and between a bias and a residual.

use super::dispatch::by_dtype;
use super::simd::{CHUNK, Real, vectorized};
use crate::Dropout;
use crate::operation::{BiasDropoutAdd, DropoutScale};
use crate::random::random_u32;
use rayon::prelude::*;

/// The numbers of a [`Dropout`] that can drop elements.
#[derive(Clone, Copy)]
pub(super) struct Mask {
    threshold: u32,
    scale: f32,
    key: u64,
}

impl Mask {
    pub(super) fn of(dropout: Option<Dropout>) -> Option<Mask> {
        dropout.and_then(Dropout::effective).map(Mask::new)
    }

    fn new(dropout: Dropout) -> Mask {
        let key = dropout.key.slice::<u32>();
        Mask {
            threshold: dropout.threshold(),
            scale: dropout.scale(),
            key: u64::from(key[1]) << 32 | u64::from(key[0]),
        }
    }
}

/// Columns that are widened at a time.
const COLUMNS: usize = 1024;

pub(super) fn bias_dropout_add(op: BiasDropoutAdd) {
    by_dtype!(op.out.dtype(), bias_dropout_add_of(op));
}

fn bias_dropout_add_of<T: Real>(op: BiasDropoutAdd) {
    let width = op.out.dims()[1];
    let [bias, residual] = [op.bias, op.residual].map(|x| x.map(|x| x.slice::<T>()));
    let mask = Mask::of(op.dropout);
    let rows = (CHUNK / width).max(1);
    let pieces = op.out.slice_mut::<T>().par_chunks_mut(rows * width);
    pieces.enumerate().for_each(|(piece, out)| {
        for (row, out) in (piece * rows..).zip(out.chunks_exact_mut(width)) {
            let residual = residual.map(|residual| &residual[row * width..][..width]);
            let first = (op.first + row * width) as u64;
            bias_dropout_add_row(out, bias, (mask, first), op.scale, residual);
        }
    });
}

pub(super) fn dropout_scale(op: DropoutScale) {
    by_dtype!(op.out.dtype(), dropout_scale_of(op));
}

fn dropout_scale_of<T: Real>(op: DropoutScale) {
    let mask = Mask::of(op.dropout);
    let pieces = op.out.slice_mut::<T>().par_chunks_mut(CHUNK);
    let pieces = pieces.zip(op.x.slice::<T>().par_chunks(CHUNK));
    pieces.enumerate().for_each(|(piece, (out, x))| {
        out.copy_from_slice(x);
        let first = (op.first + piece * CHUNK) as u64;
        bias_dropout_add_row(out, None, (mask, first), op.scale, None);
    });
}

vectorized! {
    /// `mask` comes with the index of the row's first element.
    fn bias_dropout_add_row<T: Real>(
        out: &mut [T],
        bias: Option<&[T]>,
        mask: (Option<Mask>, u64),
        scale: f32,
        residual: Option<&[T]>,
    ) {
        let (mask, first) = mask;
        let mut values = [0.0f32; COLUMNS];
        for (block, out) in out.chunks_mut(COLUMNS).enumerate() {
            let (start, values) = (block * COLUMNS, &mut values[..out.len()]);
            for (value, out) in values.iter_mut().zip(&*out) {
                *value = out.widen();
            }
            if let Some(bias) = bias {
                add(values, &bias[start..]);
            }
            if let Some(mask) = mask {
                drop_elements(values, first + start as u64, 1, mask);
            }
            for value in values.iter_mut() {
                *value *= scale;
            }
            if let Some(residual) = residual {
                add(values, &residual[start..]);
            }
            for (out, value) in out.iter_mut().zip(values) {
                *out = T::narrow(*value);
            }
        }
    }

    /// Drops elements and scales the others. `first` is the index of the first, `step` the distance between neighbours.
    pub(super) fn drop_elements(values: &mut [f32], first: u64, step: u64, mask: Mask) {
        let Mask { threshold, scale, key } = mask;
        for (place, value) in (0..).zip(values) {
            let kept = random_u32(key, first + place * step) >= threshold;
            *value = if kept { *value * scale } else { 0.0 };
        }
    }
}

#[inline(always)]
fn add<T: Real>(values: &mut [f32], x: &[T]) {
    for (value, x) in values.iter_mut().zip(x) {
        *value += x.widen();
    }
}
