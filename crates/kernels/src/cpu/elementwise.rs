//! Fill, copy, bias.

use super::dispatch::{by_dtype, by_dtypes};
use super::simd::{CHUNK, Real, vectorized};
use super::{Shared, overwrites, part};
use crate::operation::{self, AddBias, BiasBackward, Fill};
use memory::{In, Out};
use rayon::prelude::*;

/// Columns of a bias gradient that one task sums.
const COLUMNS: usize = 32;

pub(super) fn fill(Fill { out, value }: Fill) {
    by_dtype!(out.dtype(), fill_of(out.slice_mut(), value));
}

fn fill_of<T: Real>(out: &mut [T], value: f32) {
    let value = T::narrow(value);
    out.par_chunks_mut(CHUNK)
        .for_each(|chunk| chunk.fill(value));
}

pub(super) fn copy(operation::Copy { out, x }: operation::Copy) {
    match out.is_contiguous() && x.is_contiguous() {
        true => by_dtypes!(out.dtype(), x.dtype(), copy_of(out.slice_mut(), x.slice())),
        false => by_dtypes!(out.dtype(), x.dtype(), copy_rows_of(out, x)),
    }
}

/// Copies between matrices that may have gaps between rows.
fn copy_rows_of<O: Real, I: Real>(out: Out, x: In) {
    let &[rows, columns] = x.dims() else {
        unreachable!("only matrices have gaps");
    };
    let (strides, at_a_time) = ([out.strides()[0], x.strides()[0]], CHUNK / columns.max(1));
    let out = Shared(out.pointer().cast::<O>());
    let x = Shared(x.pointer().cast::<I>().cast_mut());
    let all = (0..rows).into_par_iter().with_min_len(at_a_time.max(1));
    all.for_each(|row| {
        // SAFETY: the rows lie within the views; that of the output, which is exclusive, is this task's alone.
        let (out, x) = unsafe {
            (
                part(out, row * strides[0], columns),
                std::slice::from_raw_parts(x.at(row * strides[1]), columns),
            )
        };
        for (out, x) in out.iter_mut().zip(x) {
            *out = O::narrow(x.widen());
        }
    });
}

pub(super) fn copy_of<O: Real, I: Real>(out: &mut [O], x: &[I]) {
    out.par_chunks_mut(CHUNK)
        .zip(x.par_chunks(CHUNK))
        .for_each(|(out, x)| {
            for (out, x) in out.iter_mut().zip(x) {
                *out = O::narrow(x.widen());
            }
        });
}

pub(super) fn add_bias(AddBias { mut out, bias }: AddBias) {
    for (columns, bias) in bias.columns().into_iter().zip(bias) {
        let out = out.reborrow().columns(columns);
        by_dtype!(out.dtype(), add_bias_of(out, bias));
    }
}

/// Adds a bias to every row of an output. There may be gaps between rows.
pub(super) fn add_bias_of<T: Real>(out: Out, bias: In) {
    let (bias, stride) = (bias.slice::<T>(), out.strides()[0]);
    let rows = (CHUNK / bias.len().max(1)).max(1);
    let all = out.dims()[0];
    let out = Shared(out.pointer().cast::<T>());
    (0..all.div_ceil(rows)).into_par_iter().for_each(|chunk| {
        for row in chunk * rows..all.min((chunk + 1) * rows) {
            // SAFETY: the row lies within the view, which is exclusive, and is this task's alone.
            let row = unsafe { part(out, row * stride, bias.len()) };
            for (out, bias) in row.iter_mut().zip(bias) {
                *out = T::narrow(out.widen() + bias.widen());
            }
        }
    });
}

pub(super) fn bias_backward(BiasBackward { out, dy, init }: BiasBackward) {
    for (columns, out) in out.columns().into_iter().zip(out) {
        let dy = dy.columns(columns);
        by_dtypes!(
            out.dtype(),
            dy.dtype(),
            bias_backward_of(out.slice_mut(), dy, overwrites(&init))
        );
    }
}

fn bias_backward_of<G: Real, T: Real>(out: &mut [G], dy: In, overwrite: bool) {
    let (rows, stride) = (dy.dims()[0], dy.strides()[0]);
    let reach = rows.saturating_sub(1) * stride + out.len();
    let dy = match rows {
        0 => &[],
        // SAFETY: from the first row to the end of the last, with what lies between in the same borrowed tensor.
        _ => unsafe { std::slice::from_raw_parts(dy.pointer().cast::<T>(), reach) },
    };
    out.par_chunks_mut(COLUMNS)
        .enumerate()
        .for_each(|(block, out)| {
            let mut sums = [0.0f32; COLUMNS];
            column_sums(&mut sums, dy, stride, block * COLUMNS, out.len());
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = G::narrow(if overwrite { sum } else { out.widen() + sum });
            }
        });
}

vectorized! {
    /// Sums of `columns` columns from `first`, rows in order, each `stride` elements after the one before.
    fn column_sums<T: Real>(sums: &mut [f32; COLUMNS], dy: &[T], stride: usize, first: usize, columns: usize) {
        for row in dy.chunks(stride) {
            for (sum, dy) in sums.iter_mut().zip(&row[first..first + columns]) {
                *sum += dy.widen();
            }
        }
    }
}
