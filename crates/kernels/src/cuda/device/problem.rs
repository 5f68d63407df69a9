//! A product of row-major matrices as cuBLASLt takes it: column by column.
//!
//! Read column by column, a row-major matrix is its own transpose. So `out = a b` is computed as
//! `out^T = b^T a^T`, and nothing is copied.

use crate::cuda::{BIAS_ALIGNMENT_BYTES, Gemm, Matrix, SCALE_ALIGNMENT_BYTES};
use crate::{KernelError, Result};
use memory::DType;
use serde::{Deserialize, Serialize};

/// Alignments above this make no difference to the library.
const ALIGNMENT_MAX_BYTES: u32 = 256;

/// Addresses, strides and sizes of products of codes must be multiples of this.
const CODES_ALIGNMENT_BYTES: usize = 16;

/// A matrix column by column, without its place in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Layout {
    /// f32 or bf16, or codes of FP8.
    #[serde(with = "super::algorithms::dtype_name")]
    pub(super) dtype: DType,
    /// Elements of a column.
    pub(super) rows: u64,
    /// Number of columns.
    pub(super) columns: u64,
    /// Elements from a column to the next.
    pub(super) leading: i64,
    /// Elements from a matrix of the batch to the next.
    pub(super) batch_stride: i64,
    /// What the addresses of all its columns are multiples of.
    pub(super) alignment_bytes: u32,
}

/// `d [n, m] = c + alpha left right`, and a bias `[n]` added to every column, column by column. All that the choice of an
/// algorithm may depend on; files of algorithms have it as it stands here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Problem {
    /// `[n, k]`, or its transpose.
    pub(super) left: Layout,
    /// Whether rows and columns of `left` are to be exchanged.
    pub(super) left_transposed: bool,
    /// `[k, m]`, or its transpose.
    pub(super) right: Layout,
    /// Whether rows and columns of `right` are to be exchanged.
    pub(super) right_transposed: bool,
    /// The matrix that is added; `d` if there is none.
    pub(super) c: Layout,
    /// The result.
    pub(super) d: Layout,
    /// Whether a bias of the result's type is added.
    pub(super) has_bias: bool,
    /// Number of products.
    pub(super) batch: i32,
    /// Whether sums of codes may be kept in fewer bits than f32 has.
    #[serde(default)]
    pub(super) fast_accumulation: bool,
}

/// Where the matrices of a problem lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pointers {
    pub(super) left: *const u8,
    pub(super) right: *const u8,
    pub(super) c: *const u8,
    pub(super) d: *mut u8,
    /// Null where there is none.
    pub(super) bias: *const u8,
    /// Scales of `left` and `right`; null where these are no codes.
    pub(super) scales: [*const u8; 2],
}

impl Problem {
    /// The product as the library takes it.
    ///
    /// # Errors
    /// [`KernelError`] for types, strides or sizes that it does not take.
    pub(super) fn new(gemm: &Gemm) -> Result<(Problem, Pointers)> {
        let [m, k, n] = gemm.sizes;
        let Ok(batch) = i32::try_from(gemm.batch) else {
            return refuse(format!("{} products at once", gemm.batch));
        };
        if m == 0 || k == 0 || n == 0 || batch == 0 {
            return refuse(format!("{batch} products of {m} x {k} x {n}"));
        }
        check_types(gemm)?;
        check_bias(gemm)?;
        check_codes(gemm)?;
        let (left, left_transposed) = operand("b", &gemm.b, [k, n])?;
        let (right, right_transposed) = operand("a", &gemm.a, [m, k])?;
        let c = gemm.init.unwrap_or(gemm.out);
        let problem = Problem {
            left,
            left_transposed,
            right,
            right_transposed,
            c: result("init", &c, [m, n])?,
            d: result("out", &gemm.out, [m, n])?,
            has_bias: gemm.bias.is_some(),
            batch,
            fast_accumulation: gemm.fast_accumulation,
        };
        let pointers = Pointers {
            left: gemm.b.pointer,
            right: gemm.a.pointer,
            c: c.pointer,
            d: gemm.out.pointer.cast_mut(),
            bias: gemm.bias.unwrap_or(std::ptr::null()),
            scales: gemm.scales.map_or([std::ptr::null(); 2], |[a, b]| [b, a]),
        };
        Ok((problem, pointers))
    }
}

fn refuse<T>(message: String) -> Result<T> {
    Err(KernelError::misfit("gemm", message))
}

fn check_types(gemm: &Gemm) -> Result {
    let types = [gemm.out.dtype, gemm.a.dtype, gemm.b.dtype];
    let are_codes = gemm.a.dtype.is_fp8();
    let known = match types {
        [DType::F32 | DType::BF16, a, b] if are_codes => b.is_fp8() && [a, b] != [DType::F8E5M2; 2],
        [DType::F32, DType::F32, DType::F32] => true,
        [DType::F32 | DType::BF16, DType::BF16, DType::BF16] => true,
        _ => false,
    };
    if !known
        || are_codes != gemm.scales.is_some()
        || gemm.fast_accumulation && !are_codes
        || gemm.init.is_some_and(|init| init.dtype != gemm.out.dtype)
    {
        return refuse(format!("the library takes no products of {types:?}"));
    }
    Ok(())
}

/// Algorithms read biases in wide accesses.
fn check_bias(gemm: &Gemm) -> Result {
    match gemm.bias {
        Some(bias) if !(bias as usize).is_multiple_of(BIAS_ALIGNMENT_BYTES) => refuse(format!(
            "a bias at {bias:?}, which is no multiple of {BIAS_ALIGNMENT_BYTES}"
        )),
        _ => Ok(()),
    }
}

/// Before 10.0 codes are multiplied only where both operands have the summed axis innermost, 16 bytes at a time.
fn check_codes(gemm: &Gemm) -> Result {
    let Some(scales) = gemm.scales else {
        return Ok(());
    };
    let [_, k, n] = gemm.sizes;
    let are_rows = gemm.a.column_stride == 1 && gemm.b.row_stride == 1;
    let bias_fits = gemm.bias.is_none() || gemm.out.dtype == DType::BF16;
    let init = gemm.init.unwrap_or(gemm.out);
    let lines = [
        (gemm.a, gemm.a.row_stride),
        (gemm.b, gemm.b.column_stride),
        (init, init.row_stride),
        (gemm.out, gemm.out.row_stride),
    ];
    let are_aligned = lines.iter().all(|(matrix, line)| {
        let bytes = line * matrix.dtype.size_in_bytes();
        (matrix.pointer as usize | bytes).is_multiple_of(CODES_ALIGNMENT_BYTES)
    });
    let sizes_fit = [k, n]
        .iter()
        .all(|size| size.is_multiple_of(CODES_ALIGNMENT_BYTES));
    let scales_fit = scales
        .iter()
        .all(|scale| (*scale as usize).is_multiple_of(SCALE_ALIGNMENT_BYTES));
    match are_rows && bias_fits && are_aligned && sizes_fit && scales_fit {
        true => Ok(()),
        false => refuse(format!(
            "no product of codes is laid out so, or has its scales there: {gemm:?}"
        )),
    }
}

/// The layout of an operand of `rows` by `columns` as the library reads it, column by column, and whether it then has to
/// transpose it.
fn operand(name: &str, matrix: &Matrix, [rows, columns]: [usize; 2]) -> Result<(Layout, bool)> {
    if let Some(leading) = leading(matrix.row_stride, matrix.column_stride, rows, columns) {
        return Ok((layout(matrix, [columns, rows], leading), false));
    }
    if let Some(leading) = leading(matrix.column_stride, matrix.row_stride, columns, rows) {
        return Ok((layout(matrix, [rows, columns], leading), true));
    }
    refuse(format!(
        "`{name}` of {rows} x {columns} has no neighbouring elements: {matrix:?}"
    ))
}

/// The layout of a matrix that is written or added, which must be row-major.
fn result(name: &str, matrix: &Matrix, [rows, columns]: [usize; 2]) -> Result<Layout> {
    match leading(matrix.row_stride, matrix.column_stride, rows, columns) {
        Some(leading) => Ok(layout(matrix, [columns, rows], leading)),
        None => refuse(format!(
            "`{name}` of {rows} x {columns} is not row-major: {matrix:?}"
        )),
    }
}

/// Elements from one line to the next, if the elements of a line are neighbours and lines do not overlap.
fn leading(
    line_stride: usize,
    element_stride: usize,
    lines: usize,
    elements: usize,
) -> Option<usize> {
    if element_stride != 1 && elements > 1 {
        return None;
    }
    match lines {
        // One line has no next one.
        1 => Some(elements),
        _ => (line_stride >= elements).then_some(line_stride),
    }
}

fn layout(matrix: &Matrix, [rows, columns]: [usize; 2], leading: usize) -> Layout {
    let bytes = |elements: usize| elements * matrix.dtype.size_in_bytes();
    // What an algorithm asks for, it asks of every distance too (cublasLt.h, CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES).
    let distances = bytes(leading) | bytes(matrix.batch_stride);
    let zeros = (matrix.pointer as usize | distances).trailing_zeros();
    Layout {
        dtype: matrix.dtype,
        rows: rows as u64,
        columns: columns as u64,
        leading: leading as i64,
        batch_stride: matrix.batch_stride as i64,
        alignment_bytes: 1 << zeros.min(ALIGNMENT_MAX_BYTES.trailing_zeros()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distinct small whole numbers, so that sums are exact.
    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count)
            .map(|index| ((index * 37 + seed * 11) % 23) as f32 - 11.0)
            .collect()
    }

    fn matrix(
        data: &[f32],
        row_stride: usize,
        column_stride: usize,
        batch_stride: usize,
    ) -> Matrix {
        Matrix {
            pointer: data.as_ptr().cast(),
            dtype: DType::F32,
            row_stride,
            column_stride,
            batch_stride,
        }
    }

    /// An element of a column-major matrix.
    fn at(layout: &Layout, transposed: bool, pointer: *const u8, index: [u64; 3]) -> f32 {
        let [product, row, column] = match (transposed, index) {
            (false, index) => index,
            (true, [product, row, column]) => [product, column, row],
        };
        assert!(row < layout.rows && column < layout.columns);
        let offset = product as i64 * layout.batch_stride + column as i64 * layout.leading;
        // SAFETY: the tests lay their data out so.
        unsafe { *pointer.cast::<f32>().offset(offset as isize + row as isize) }
    }

    /// What the library is documented to compute, as `[batch, m, n]`.
    fn column_major(gemm: &Gemm) -> Vec<f32> {
        let (problem, pointers) = Problem::new(gemm).unwrap();
        let [m, k, n] = gemm.sizes.map(|size| size as u64);
        assert_eq!((problem.d.rows, problem.d.columns), (n, m));
        let mut out = Vec::new();
        for product in 0..problem.batch as u64 {
            for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                let sum: f32 = (0..k)
                    .map(|depth| {
                        let (left, left_t) = (&problem.left, problem.left_transposed);
                        let (right, right_t) = (&problem.right, problem.right_transposed);
                        at(left, left_t, pointers.left, [product, column, depth])
                            * at(right, right_t, pointers.right, [product, depth, row])
                    })
                    .sum();
                let c = at(&problem.c, false, pointers.c, [product, column, row]);
                let beta = f32::from(u8::from(gemm.init.is_some()));
                // SAFETY: the tests lay their data out so.
                let bias = |bias: *const u8| unsafe { *bias.cast::<f32>().add(column as usize) };
                let bias = problem.has_bias.then(|| bias(pointers.bias));
                out.push(gemm.alpha * sum + beta * c + bias.unwrap_or(0.0));
            }
        }
        out
    }

    /// What a product of our own means.
    fn row_major(gemm: &Gemm) -> Vec<f32> {
        let [m, k, n] = gemm.sizes;
        let at = |matrix: &Matrix, product: usize, row: usize, column: usize| {
            let offset = product * matrix.batch_stride
                + row * matrix.row_stride
                + column * matrix.column_stride;
            // SAFETY: the tests lay their data out so.
            unsafe { *matrix.pointer.cast::<f32>().add(offset) }
        };
        let mut out = Vec::new();
        for product in 0..gemm.batch {
            for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                let terms = (0..k).map(|depth| {
                    at(&gemm.a, product, row, depth) * at(&gemm.b, product, depth, column)
                });
                let init = gemm
                    .init
                    .map_or(0.0, |init| at(&init, product, row, column));
                // SAFETY: the tests lay their data out so.
                let bias = |bias: *const u8| unsafe { *bias.cast::<f32>().add(column) };
                out.push(gemm.alpha * terms.sum::<f32>() + init + gemm.bias.map_or(0.0, bias));
            }
        }
        out
    }

    #[test]
    fn products_are_those_of_row_major_matrices() {
        let sizes = [
            [3, 4, 5],
            [1, 4, 5],
            [3, 1, 5],
            [3, 4, 1],
            [1, 1, 1],
            [1, 7, 1],
        ];
        for [m, k, n] in sizes {
            let batch = 3;
            let space = batch * (m + k + n + 8) * (m + k + n + 8);
            let (a, b) = (numbers(space, 1), numbers(space, 2));
            let (init, out) = (numbers(space, 3), numbers(space, 4));
            let added = numbers(n + BIAS_ALIGNMENT_BYTES, 5);
            let bias = &added[added.as_ptr().align_offset(BIAS_ALIGNMENT_BYTES)..];
            let pad = n + 3;
            let outs = [(n, m * n), (pad, m * pad)];
            let operands = |data: &[f32], rows: usize, columns: usize| {
                [
                    matrix(data, columns, 1, rows * columns),
                    matrix(data, columns + 2, 1, 0),
                    matrix(data, rows, 1, rows * columns).t(),
                    matrix(data, rows + 1, 1, 1).t(),
                ]
            };
            for a in operands(&a, m, k) {
                for b in operands(&b, k, n) {
                    for (row_stride, batch_stride) in outs {
                        let out = matrix(&out, row_stride, 1, batch_stride);
                        let init = matrix(&init, n + 1, 1, m * (n + 1));
                        let inits = [None, Some(out), Some(init)];
                        let biases = [None, Some(bias.as_ptr().cast())];
                        for (init, bias) in inits
                            .into_iter()
                            .flat_map(|init| biases.map(|bias| (init, bias)))
                        {
                            let sizes = [m, k, n];
                            let gemm = Gemm {
                                sizes,
                                batch,
                                alpha: 0.5,
                                a,
                                b,
                                init,
                                bias,
                                out,
                                scales: None,
                                fast_accumulation: false,
                            };
                            assert_eq!(column_major(&gemm), row_major(&gemm), "{gemm:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn transposes_are_asked_of_the_library_and_not_made() {
        let data = numbers(64, 0);
        let (x, dy) = (matrix(&data, 4, 1, 0), matrix(&data, 5, 1, 0));
        // dW [5, 4] += dy^T [5, 3] x [3, 4], dW row-major.
        let out = matrix(&data, 4, 1, 0);
        let gemm = Gemm {
            sizes: [5, 3, 4],
            batch: 1,
            alpha: 1.0,
            a: dy.t(),
            b: x,
            init: Some(out),
            bias: None,
            out,
            scales: None,
            fast_accumulation: false,
        };
        let (problem, pointers) = Problem::new(&gemm).unwrap();
        let of = |layout: &Layout| (layout.rows, layout.columns, layout.leading);
        assert_eq!(
            (of(&problem.left), problem.left_transposed),
            ((4, 3, 4), false)
        );
        assert_eq!(
            (of(&problem.right), problem.right_transposed),
            ((5, 3, 5), true)
        );
        assert_eq!(of(&problem.d), (4, 5, 4));
        assert_eq!(
            (problem.c, pointers.c),
            (problem.d, pointers.d.cast_const())
        );
    }

    #[test]
    fn alignment_is_that_of_the_address_and_of_every_column() {
        let data = numbers(1024, 0);
        let first = data.as_ptr().align_offset(256);
        let alignment = |offset: usize, leading: usize, batch_stride: usize| {
            let matrix = matrix(&data[first + offset..], leading, 1, batch_stride);
            layout(&matrix, [1, 1], leading).alignment_bytes
        };
        for (offset, bytes) in [(0, 256), (1, 4), (4, 16), (128, 256)] {
            assert_eq!(alignment(offset, 64, 0), bytes);
        }
        for (elements, bytes) in [(1, 4), (6, 8), (64, 256), (96, 128), (128, 256)] {
            assert_eq!(alignment(0, elements, 0), bytes, "columns");
            assert_eq!(alignment(0, 64, elements), bytes, "matrices of a batch");
        }
        assert_eq!(alignment(4, 96, 0), 16);
    }

    #[test]
    fn what_the_library_does_not_take_is_refused() {
        let data = numbers(64, 0);
        let good = Gemm {
            sizes: [2, 3, 4],
            batch: 1,
            alpha: 1.0,
            a: matrix(&data, 3, 1, 0),
            b: matrix(&data, 4, 1, 0),
            init: None,
            bias: None,
            out: matrix(&data, 4, 1, 0),
            scales: None,
            fast_accumulation: false,
        };
        let aligned = data.as_ptr().align_offset(BIAS_ALIGNMENT_BYTES);
        let biased = |first: usize| Gemm {
            bias: Some(data[first..].as_ptr().cast()),
            ..good
        };
        Problem::new(&biased(aligned)).unwrap();
        let bf16 = |matrix: Matrix| Matrix {
            dtype: DType::BF16,
            ..matrix
        };
        let strided = |matrix: Matrix| Matrix {
            column_stride: 2,
            ..matrix
        };
        Problem::new(&good).unwrap();
        let refused = [
            biased(aligned + 1),
            Gemm {
                sizes: [2, 0, 4],
                ..good
            },
            Gemm {
                a: bf16(good.a),
                ..good
            },
            Gemm {
                out: bf16(good.out),
                ..good
            },
            Gemm {
                init: Some(bf16(good.out)),
                ..good
            },
            Gemm {
                a: strided(good.a),
                ..good
            },
            Gemm {
                out: good.out.t(),
                ..good
            },
            Gemm {
                b: matrix(&data, 3, 1, 0),
                ..good
            },
        ];
        assert_refused(&refused);
        let wide = Gemm {
            a: bf16(good.a),
            b: bf16(good.b),
            ..good
        };
        Problem::new(&wide).unwrap();
    }

    fn assert_refused(all: &[Gemm]) {
        for gemm in all {
            let refused = Problem::new(gemm).unwrap_err();
            assert_eq!(refused.operation, "gemm", "{gemm:?}");
        }
    }

    #[test]
    fn codes_need_scales_contiguous_rows_and_one_operand_in_e4m3() {
        let data = numbers(4096, 0);
        let data = &data[data.as_ptr().align_offset(16)..];
        let codes = |dtype: DType| Matrix {
            dtype,
            ..matrix(data, 32, 1, 0)
        };
        let scales = [data.as_ptr().cast(), data[4..].as_ptr().cast()];
        let good = Gemm {
            sizes: [3, 32, 16],
            batch: 1,
            alpha: 1.0,
            a: codes(DType::F8E5M2),
            b: codes(DType::F8E4M3).t(),
            init: None,
            bias: None,
            out: matrix(data, 16, 1, 0),
            scales: Some(scales),
            fast_accumulation: true,
        };
        let (problem, pointers) = Problem::new(&good).unwrap();
        assert_eq!(
            (problem.left_transposed, problem.right_transposed),
            (true, false)
        );
        assert_eq!(pointers.scales, [scales[1], scales[0]]);
        let shifted = Matrix {
            pointer: good.a.pointer.wrapping_add(8),
            ..good.a
        };
        let refused = [
            Gemm {
                scales: None,
                ..good
            },
            Gemm {
                b: codes(DType::F8E5M2).t(),
                ..good
            },
            Gemm {
                a: codes(DType::F8E4M3).t(),
                ..good
            },
            Gemm {
                b: codes(DType::F8E4M3),
                ..good
            },
            Gemm { a: shifted, ..good },
            Gemm {
                scales: Some([scales[0], data[5..].as_ptr().cast()]),
                ..good
            },
            Gemm {
                sizes: [3, 24, 16],
                ..good
            },
            Gemm {
                sizes: [3, 32, 8],
                ..good
            },
            Gemm {
                out: matrix(data, 18, 1, 0),
                ..good
            },
            Gemm {
                bias: Some(data.as_ptr().cast()),
                ..good
            },
        ];
        assert_refused(&refused);
    }
}
