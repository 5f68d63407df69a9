//! Matrix products: the library's where all is f32, ours where anything is bf16.

use super::Shared;
use super::elementwise::add_bias_of;
use super::gemm::{Matrix, Output, ROW_BLOCK, parallel_product};
use super::products::{Added, Instructions, multiply};
use crate::Init;
use crate::operation::Matmul;
use memory::{Buffer, DType, In, Out};
use rayon::prelude::*;
use std::cell::RefCell;

/// `workspace` is what operands are packed in, if any are bf16.
pub(super) fn matmul(
    workspace: Option<&RefCell<Buffer>>,
    instructions: Instructions,
    operation: Matmul,
) {
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
            let workspace = workspace.view_mut().slice_mut();
            multiply(out, [a, b], Added { bias, init }, workspace, instructions);
        }
        _ => {
            matmul_f32(out.reborrow(), a, b, init);
            if let Some(bias) = bias {
                add_bias_of::<f32>(out, bias);
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
