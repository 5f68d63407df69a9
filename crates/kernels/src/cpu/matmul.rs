//! Matrix products: the library's, on f32 or on what is widened to it.

use super::Shared;
use super::dispatch::by_dtype;
use super::elementwise::add_bias_of;
use super::gemm::{Matrix, Output, ROW_BLOCK, parallel_product};
use super::simd::{Real, vectorized};
use crate::Init;
use crate::operation::Matmul;
use crate::workspace::{TILE_K, TILE_M, TILE_N};
use half::bf16;
use memory::{Buffer, DType, In, Out};
use rayon::prelude::*;
use std::cell::RefCell;

/// `workspace` is what operands are widened in, if any are.
pub(super) fn matmul(workspace: Option<&RefCell<Buffer>>, operation: Matmul) {
    let Matmul {
        mut out,
        a,
        b,
        bias,
        init,
    } = operation;
    match workspace {
        Some(workspace) if [out.dtype(), a.dtype(), b.dtype()] != [DType::F32; 3] => {
            let mut workspace = workspace.borrow_mut();
            let sums = Sums { bias, init };
            matmul_widened(out, a, b, sums, workspace.view_mut().slice_mut());
        }
        _ => {
            matmul_f32(out.reborrow(), a, b, init);
            if let Some(bias) = bias {
                add_bias_of::<f32>(out, bias);
            }
        }
    }
}

/// What products are added to on their way into the output.
#[derive(Clone, Copy)]
struct Sums<'a> {
    bias: Option<In<'a>>,
    init: Init<'a>,
}

fn matmul_f32(mut out: Out, a: In, b: In, init: Init) {
    let accumulate = match init {
        Init::Overwrite => false,
        Init::Accumulate => true,
        Init::Add(residual) => {
            copy_rows(out.reborrow(), residual.slice());
            true
        }
    };
    let (m, k, n) = (a.dims()[0], a.dims()[1], b.dims()[1]);
    let stride = out.strides()[0];
    for start in (0..m).step_by(ROW_BLOCK) {
        let rows = start..(start + ROW_BLOCK).min(m);
        let a = Matrix::of(a.rows(rows.clone()));
        let out = out.reborrow().rows(rows.clone());
        let out = Output::rows(out.pointer().cast(), stride).accumulating(accumulate);
        // SAFETY: the views are in bounds, `out` is exclusive, and shapes were checked.
        unsafe { parallel_product((rows.len(), n, k), out, a, Matrix::of(b)) };
    }
}

/// Copies contiguous rows into those of an output, which may lie apart.
fn copy_rows(out: Out, x: &[f32]) {
    let (width, stride) = (out.dims()[1], out.strides()[0]);
    let out = Shared(out.pointer().cast::<f32>());
    let rows = x.par_chunks_exact(width.max(1)).enumerate();
    rows.for_each(|(row, x)| {
        // SAFETY: the row lies within the view, which is exclusive, and is this task's alone.
        let out = unsafe { std::slice::from_raw_parts_mut(out.at(row * stride), width) };
        out.copy_from_slice(x);
    });
}

/// Products with a bf16 operand or output: tiles are widened into the workspace, multiplied in f32, and rounded once.
fn matmul_widened(mut out: Out, a: In, b: In, added: Sums, workspace: &mut [f32]) {
    let (a_tile, rest) = workspace.split_at_mut(TILE_M * TILE_K);
    let (b_tile, sum_tile) = rest.split_at_mut(TILE_K * TILE_N);
    let (m, k, n) = (a.dims()[0], a.dims()[1], b.dims()[1]);
    for row in (0..m).step_by(TILE_M) {
        let rows = TILE_M.min(m - row);
        for column in (0..n).step_by(TILE_N) {
            let columns = TILE_N.min(n - column);
            for depth in (0..k).step_by(TILE_K) {
                let depths = TILE_K.min(k - depth);
                widen(a_tile, a, (row, depth), (rows, depths));
                widen(b_tile, b, (depth, column), (depths, columns));
                let (a, b) = (
                    Matrix::rows(a_tile.as_ptr(), depths),
                    Matrix::rows(b_tile.as_ptr(), columns),
                );
                let sums = Output::rows(sum_tile.as_mut_ptr(), columns).accumulating(depth > 0);
                // SAFETY: the tiles hold `rows x depths`, `depths x columns` and `rows x columns` elements.
                unsafe { parallel_product((rows, columns, depths), sums, a, b) };
            }
            store(
                out.reborrow(),
                &sum_tile[..rows * columns],
                (row, column),
                columns,
                added,
            );
        }
    }
}

/// Copies a tile of a strided matrix into contiguous f32 rows.
fn widen(tile: &mut [f32], x: In, (row, column): (usize, usize), (rows, columns): (usize, usize)) {
    let (row_stride, column_stride) = (x.strides()[0], x.strides()[1]);
    let first = row * row_stride + column * column_stride;
    let strides = (row_stride, column_stride);
    match x.dtype() {
        DType::F32 => gather::<f32>(
            tile,
            x.pointer().cast::<f32>().wrapping_add(first),
            strides,
            (rows, columns),
        ),
        _ => gather::<bf16>(
            tile,
            x.pointer().cast::<bf16>().wrapping_add(first),
            strides,
            (rows, columns),
        ),
    }
}

fn gather<T: Real>(
    tile: &mut [f32],
    first: *const T,
    (row_stride, column_stride): (usize, usize),
    (rows, columns): (usize, usize),
) {
    let source = Shared(first.cast_mut());
    tile[..rows * columns]
        .par_chunks_mut(columns)
        .enumerate()
        .for_each(|(row, tile)| {
            let source = source.at(row * row_stride);
            if column_stride == 1 {
                // SAFETY: a row of the tile lies within the view.
                widen_row(tile, unsafe { std::slice::from_raw_parts(source, columns) });
            } else {
                for (column, value) in tile.iter_mut().enumerate() {
                    // SAFETY: every element of the tile lies within the view.
                    *value = unsafe { *source.wrapping_add(column * column_stride) }.widen();
                }
            }
        });
}

vectorized! {
    fn widen_row<T: Real>(out: &mut [f32], x: &[T]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x.widen();
        }
    }
}

/// Writes a finished tile into the output.
fn store(out: Out, sums: &[f32], at: (usize, usize), columns: usize, added: Sums) {
    by_dtype!(out.dtype(), store_as(out, sums, at, columns, added));
}

fn store_as<T: Real>(
    out: Out,
    sums: &[f32],
    (row, column): (usize, usize),
    columns: usize,
    Sums { bias, init }: Sums,
) {
    let (width, stride) = (out.dims()[1], out.strides()[0]);
    let residual = match init {
        Init::Add(residual) => Some(residual.slice::<T>()),
        _ => None,
    };
    let bias = bias.map(|bias| &bias.slice::<T>()[column..column + columns]);
    let accumulate = matches!(init, Init::Accumulate);
    let out = Shared(out.pointer().cast::<T>());
    let rows = sums.par_chunks(columns).enumerate();
    rows.for_each(|(within, sums)| {
        let first = (row + within) * stride + column;
        // SAFETY: these columns of a row lie within the view, which is exclusive, and are this task's alone.
        let out = unsafe { std::slice::from_raw_parts_mut(out.at(first), columns) };
        let residual = residual.map(|residual| {
            let first = (row + within) * width + column;
            &residual[first..first + columns]
        });
        for (place, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
            let mut sum = *sum;
            match residual {
                Some(residual) => sum += residual[place].widen(),
                None if accumulate => sum += out.widen(),
                None => {}
            }
            if let Some(bias) = bias {
                sum += bias[place].widen();
            }
            *out = T::narrow(sum);
        }
    });
}
