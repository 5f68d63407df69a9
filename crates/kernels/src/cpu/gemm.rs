//! Products of f32 matrices by the library `gemm`.

use gemm_common::Parallelism;
use memory::In;

/// Rows of the output that one call of the library computes: bounds its packing buffers.
pub(super) const ROW_BLOCK: usize = 2048;

/// The library packs one operand in blocks of at most `ROW_BLOCK` x 1024 elements, shared by all threads, and the
/// other in blocks that fit a thread's second-level cache, of which no processor has more than a few MiB.
pub(super) fn packing_bytes_max(threads: usize) -> u64 {
    const SECOND_LEVEL_CACHE: u64 = 4 << 20;
    4 * (ROW_BLOCK as u64) * 1024 + (1 + threads as u64) * SECOND_LEVEL_CACHE
}

/// A two-dimensional operand in memory: pointer, distance between rows, distance between columns.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) pointer: *const f32,
    pub(super) row_stride: isize,
    pub(super) column_stride: isize,
}

impl Matrix {
    /// Rows of a row-major matrix.
    pub(super) fn rows(pointer: *const f32, row_stride: usize) -> Matrix {
        Matrix {
            pointer,
            row_stride: row_stride as isize,
            column_stride: 1,
        }
    }

    pub(super) fn t(self) -> Matrix {
        Matrix {
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// The same matrix from `row` on.
    pub(super) fn starting_at_row(self, row: usize) -> Matrix {
        let pointer = self.pointer.wrapping_offset(row as isize * self.row_stride);
        Matrix { pointer, ..self }
    }

    /// The same matrix from `column` on.
    pub(super) fn starting_at_column(self, column: usize) -> Matrix {
        self.t().starting_at_row(column).t()
    }

    /// A strided view of f32.
    pub(super) fn of(view: In) -> Matrix {
        assert!(!view.pointer().is_null(), "a shape has no data");
        let strides = view.strides();
        Matrix {
            pointer: view.pointer().cast(),
            row_stride: strides[0] as isize,
            column_stride: strides[1] as isize,
        }
    }
}

/// The output of a product: rows of f32 that it overwrites or adds to.
#[derive(Clone, Copy)]
pub(super) struct Output {
    pub(super) pointer: *mut f32,
    pub(super) row_stride: usize,
    pub(super) accumulate: bool,
}

impl Output {
    /// Rows that a product overwrites.
    pub(super) fn rows(pointer: *mut f32, row_stride: usize) -> Output {
        Output {
            pointer,
            row_stride,
            accumulate: false,
        }
    }

    /// The same from a row on.
    pub(super) fn starting_at_row(self, row: usize) -> Output {
        let pointer = self.pointer.wrapping_add(row * self.row_stride);
        Output { pointer, ..self }
    }

    /// The same rows, to which the product is added if `accumulate` is set.
    pub(super) fn accumulating(self, accumulate: bool) -> Output {
        Output { accumulate, ..self }
    }
}

/// `out = [out +] scale * a b`, for `[m, k] x [k, n]` with the sizes `(m, n, k)`, by the calling thread alone.
///
/// # Safety
/// The matrices must lie in live memory, and nothing else may touch the output's `m` rows of `n`.
pub(super) unsafe fn product(
    sizes: (usize, usize, usize),
    out: Output,
    a: Matrix,
    b: Matrix,
    scale: f32,
) {
    // SAFETY: the caller's promise.
    unsafe { multiply(sizes, out, [a, b], scale, Parallelism::None) }
}

/// Rows of [`product_of_few_rows`]: of more, the library packs the other operand too.
pub(super) const FEW_ROWS: usize = 32;

/// As [`product`] without a scale, for at most [`FEW_ROWS`] rows and a matrix whose columns are contiguous. The library
/// reads it in place: packing it would take longer than so few rows do.
///
/// # Safety
/// As for [`product`].
pub(super) unsafe fn product_of_few_rows(
    sizes: (usize, usize, usize),
    out: Output,
    a: Matrix,
    b: Matrix,
) {
    let strides = [out.row_stride as isize, 1];
    // SAFETY: the caller's promise.
    unsafe { call_library(sizes, out, strides, [a, b], 1.0, Parallelism::None) }
}

/// As [`product`], without a scale, and by all threads.
///
/// # Safety
/// As for [`product`].
pub(super) unsafe fn parallel_product(
    sizes: (usize, usize, usize),
    out: Output,
    a: Matrix,
    b: Matrix,
) {
    // SAFETY: the caller's promise.
    unsafe { multiply(sizes, out, [a, b], 1.0, Parallelism::Rayon(0)) }
}

/// `out = factor a b`, or adds to `out`, by as many threads as `parallelism` says.
///
/// # Safety
/// As for [`product`].
unsafe fn multiply(
    (m, n, k): (usize, usize, usize),
    out: Output,
    [a, b]: [Matrix; 2],
    scale: f32,
    parallelism: Parallelism,
) {
    // The library stores the columns of its output as vectors: rows are the columns of the transposed product.
    let stride = out.row_stride as isize;
    let (sizes, operands, strides) = match stride > 1 {
        true => ((n, m, k), [b.t(), a.t()], [1, stride]),
        false => ((m, n, k), [a, b], [stride, 1]),
    };
    // SAFETY: the caller's promise.
    unsafe { call_library(sizes, out, strides, operands, scale, parallelism) }
}

/// The product as the library is asked for it. `rows` and `columns` are the distances between those of the output.
///
/// # Safety
/// As for [`product`].
unsafe fn call_library(
    (m, n, k): (usize, usize, usize),
    out: Output,
    [rows, columns]: [isize; 2],
    [a, b]: [Matrix; 2],
    scale: f32,
    parallelism: Parallelism,
) {
    // SAFETY: the caller's promise; strides describe the matrices.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            m,
            n,
            k,
            out.pointer,
            columns,
            rows,
            out.accumulate,
            a.pointer,
            a.column_stride,
            a.row_stride,
            b.pointer,
            b.column_stride,
            b.row_stride,
            1.0,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}
