//! Fill, copy, bias.

use super::dispatch::{by_dtype, by_dtypes};
use super::overwrites;
use super::simd::{CHUNK, Real, vectorized};
use crate::operation::{self, AddBias, BiasBackward, Fill};
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
    by_dtypes!(out.dtype(), x.dtype(), copy_of(out.slice_mut(), x.slice()));
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

pub(super) fn add_bias(AddBias { out, bias }: AddBias) {
    by_dtype!(out.dtype(), add_bias_of(out.slice_mut(), bias.slice()));
}

fn add_bias_of<T: Real>(out: &mut [T], bias: &[T]) {
    let rows = (CHUNK / bias.len()).max(1);
    out.par_chunks_mut(rows * bias.len()).for_each(|chunk| {
        for row in chunk.chunks_exact_mut(bias.len()) {
            for (out, bias) in row.iter_mut().zip(bias) {
                *out = T::narrow(out.widen() + bias.widen());
            }
        }
    });
}

pub(super) fn bias_backward(BiasBackward { out, dy, init }: BiasBackward) {
    by_dtypes!(
        out.dtype(),
        dy.dtype(),
        bias_backward_of(out.slice_mut(), dy.slice(), overwrites(&init))
    );
}

fn bias_backward_of<G: Real, T: Real>(out: &mut [G], dy: &[T], overwrite: bool) {
    let width = out.len();
    out.par_chunks_mut(COLUMNS)
        .enumerate()
        .for_each(|(block, out)| {
            let mut sums = [0.0f32; COLUMNS];
            column_sums(&mut sums, dy, width, block * COLUMNS, out.len());
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = G::narrow(if overwrite { sum } else { out.widen() + sum });
            }
        });
}

vectorized! {
    /// Sums of `columns` columns from `first`, rows in order.
    fn column_sums<T: Real>(sums: &mut [f32; COLUMNS], dy: &[T], width: usize, first: usize, columns: usize) {
        for row in dy.chunks_exact(width) {
            for (sum, dy) in sums.iter_mut().zip(&row[first..first + columns]) {
                *sum += dy.widen();
            }
        }
    }
}
