//! Matrix products: by the library if all operands are f32, by `products` if any is bf16.

use super::elementwise::add_bias_of;
use super::gemm::{Matrix, Output, ROW_BLOCK, parallel_product, product};
use super::products::{Added, multiply, multiply_by_itself};
use super::{Cpu, Shared, part};
use crate::Init;
use crate::operation::{Gram, Matmul};
use memory::{In, Out};
use rayon::prelude::*;

pub(super) fn matmul(cpu: &Cpu, mut op: Matmul) {
    match cpu.packing(&[op.out.dtype(), op.a.dtype(), op.b.dtype()]) {
        Some(mut room) => {
            let added = Added {
                bias: op.bias,
                init: op.init,
            };
            multiply(op.out, [op.a, op.b], added, &mut room, cpu.instructions);
        }
        None => {
            matmul_f32(op.out.reborrow(), op.a, op.b, op.init);
            if let Some(bias) = op.bias {
                add_bias_of::<f32>(op.out, bias);
            }
        }
    }
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

/// Copies contiguous rows into the rows of an output, which may have gaps between them.
fn copy_rows(out: Out, x: &[f32]) {
    let (width, stride) = (out.dims()[1], out.strides()[0]);
    let out = Shared(out.pointer().cast::<f32>());
    let rows = x.par_chunks_exact(width.max(1)).enumerate();
    rows.for_each(|(row, x)| {
        // SAFETY: the row lies within the view, which is exclusive, and is this task's alone.
        let out = unsafe { part(out, row * stride, width) };
        out.copy_from_slice(x);
    });
}

/// The products of a matrix's rows with one another. Computes bands of rows up to the diagonal, and copies them across
/// it.
pub(super) fn gram(cpu: &Cpu, Gram { out, x }: Gram) {
    match cpu.packing(&[out.dtype(), x.dtype()]) {
        Some(mut room) => multiply_by_itself(out, x, &mut room, cpu.instructions),
        None => gram_f32(out, x),
    }
}

/// Rows of a band: a multiple of the library's register blocks. More bands compute less above the diagonal, but read
/// the other rows more often.
fn band_rows(rows: usize) -> usize {
    48 * (rows / 768).clamp(1, 8)
}

fn gram_f32(out: Out, x: In) {
    let (rows, inner) = (x.dims()[0], x.dims()[1]);
    let band = band_rows(rows);
    let out = Shared(out.pointer().cast::<f32>());
    // The longest bands come first, and any thread may take the next.
    let bands = (0..rows.div_ceil(band)).into_par_iter().rev();
    bands.with_max_len(1).for_each(|index| {
        let first = index * band;
        let end = (first + band).min(rows);
        let band = Output::rows(out.at(first * rows), rows);
        let x = Matrix::of(x);
        let sizes = (end - first, end, inner);
        // SAFETY: the views are in bounds, and shapes were checked. This task alone has the band up to the diagonal, and what
        // lies across from it.
        unsafe {
            product(sizes, band, x.starting_at_row(first), x.t(), 1.0);
            for row in 0..end {
                for column in first.max(row + 1)..end {
                    *out.at(row * rows + column) = *out.at(column * rows + row);
                }
            }
        }
    });
}
