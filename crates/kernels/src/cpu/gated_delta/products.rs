//! Products of small f32 matrices by the calling thread: the library `gemm`, whose sums depend on sizes alone.

use crate::cpu::gemm::{Matrix, Output, product};
use crate::cpu::simd::{lane_sum, vectorized};

/// Rows of a matrix, some elements from one to the next.
#[derive(Clone, Copy)]
pub(super) struct SmallMatrix<'a> {
    elements: &'a [f32],
    dims: [usize; 2],
    stride: usize,
    is_transposed: bool,
}

impl<'a> SmallMatrix<'a> {
    /// The first rows of a matrix of so many columns.
    pub(super) fn rows(elements: &'a [f32], rows: usize, columns: usize) -> SmallMatrix<'a> {
        SmallMatrix::part(elements, [rows, columns], columns)
    }

    /// The first rows and columns of a matrix with `stride` columns.
    pub(super) fn part(elements: &'a [f32], dims: [usize; 2], stride: usize) -> SmallMatrix<'a> {
        assert!(dims[1] <= stride && elements.len() + stride >= dims[0] * stride + dims[1]);
        SmallMatrix {
            elements,
            dims,
            stride,
            is_transposed: false,
        }
    }

    pub(super) fn t(self) -> SmallMatrix<'a> {
        SmallMatrix {
            is_transposed: !self.is_transposed,
            ..self
        }
    }

    /// Its matrix, rows and columns.
    fn matrix(&self) -> (Matrix, [usize; 2]) {
        let (matrix, [rows, columns]) =
            (Matrix::rows(self.elements.as_ptr(), self.stride), self.dims);
        match self.is_transposed {
            true => (matrix.t(), [columns, rows]),
            false => (matrix, [rows, columns]),
        }
    }
}

/// `out = scale a b`, rows of `stride` elements.
pub(super) fn multiply(out: &mut [f32], stride: usize, [a, b]: [SmallMatrix; 2], scale: f32) {
    call(out, stride, [a, b], scale, false);
}

/// `out += scale a b`.
pub(super) fn add_product(out: &mut [f32], stride: usize, [a, b]: [SmallMatrix; 2], scale: f32) {
    call(out, stride, [a, b], scale, true);
}

fn call(out: &mut [f32], stride: usize, [a, b]: [SmallMatrix; 2], scale: f32, accumulate: bool) {
    let ((a, [m, k]), (b, [inner, n])) = (a.matrix(), b.matrix());
    assert!(k == inner && n <= stride && out.len() + stride >= m * stride + n);
    let out = Output::rows(out.as_mut_ptr(), stride).accumulating(accumulate);
    // SAFETY: the matrices lie in the slices, and the output is borrowed alone.
    unsafe { product((m, n, k), out, a, b, scale) }
}

vectorized! {
    /// `y += factor x`.
    pub(super) fn add_times(y: &mut [f32], factor: f32, x: &[f32]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y += factor * x);
    }

    /// `out = factor x`.
    pub(super) fn times(out: &mut [f32], factor: f32, x: &[f32]) {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = factor * x);
    }

    pub(super) fn scale(x: &mut [f32], factor: f32) {
        x.iter_mut().for_each(|x| *x *= factor);
    }

    pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
        lane_sum([a, b], |[a, b]| a * b)
    }
}

/// Rows of `x`, each times its factor.
pub(super) fn scale_rows(out: &mut [f32], factors: &[f32], x: &[f32], width: usize) {
    let rows = out.chunks_exact_mut(width).zip(x.chunks_exact(width));
    for ((out, x), factor) in rows.zip(factors) {
        times(out, *factor, x);
    }
}

/// Takes room for some numbers from scratch.
pub(super) fn take<'a>(scratch: &mut &'a mut [f32], elements: usize) -> &'a mut [f32] {
    let (taken, rest) = std::mem::take(scratch).split_at_mut(elements);
    *scratch = rest;
    taken
}
