//! Sums of rows, one row after the other.

use super::dispatch::by_dtype;
use super::overwrites;
use super::simd::{CHUNK, Real, vectorized};
use crate::operation::SumInOrder;
use rayon::prelude::*;

pub(super) fn sum_in_order(SumInOrder { out, x, init }: SumInOrder) {
    by_dtype!(
        out.dtype(),
        sum_in_order_of(out.slice_mut(), x.slice(), overwrites(&init))
    );
}

fn sum_in_order_of<T: Real>(out: &mut [T], x: &[T], overwrite: bool) {
    let width = out.len();
    if width == 0 {
        return;
    }
    let chunks = out.par_chunks_mut(CHUNK).enumerate();
    chunks.for_each(|(index, out)| {
        let columns = index * CHUNK..index * CHUNK + out.len();
        let mut rows = x.chunks_exact(width).map(|row| &row[columns.clone()]);
        if overwrite && let Some(first) = rows.next() {
            out.copy_from_slice(first);
        }
        rows.for_each(|row| add(out, row));
    });
}

vectorized! {
    fn add<T: Real>(out: &mut [T], row: &[T]) {
        for (out, value) in out.iter_mut().zip(row) {
            *out = T::narrow(out.widen() + value.widen());
        }
    }
}
