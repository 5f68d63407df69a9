//! Splits the product for queries, keys and values for attention, and joins their gradients.

use super::dispatch::by_dtype;
use super::fp8::find_largest;
use super::rotary::{angles, rotate};
use super::simd::{CHUNK, Real};
use crate::operation::{JoinQkv, SplitQkv, Turn};
use rayon::prelude::*;
use std::ops::Range;

/// The columns of queries, keys and values, each with the rotary embedding that turns it.
fn parts(
    width: usize,
    [k_width, v_width]: [usize; 2],
    turn: Option<Turn>,
) -> [(Range<usize>, Option<Turn>); 3] {
    let values = width - v_width;
    let keys = values - k_width;
    [
        (0..keys, turn.map(Turn::of_queries)),
        (keys..values, turn),
        (values..width, None),
    ]
}

/// Copies a token's part of a row, and turns it.
fn copy_turned<T: Real>(out: &mut [T], x: &[T], turn: Option<Turn>, token: usize, inverse: bool) {
    out.copy_from_slice(x);
    if let Some(turn) = turn {
        let angles = angles(turn.table, turn.positions, token);
        rotate(out, turn.head_dim, angles, inverse);
    }
}

pub(super) fn split_qkv(op: SplitQkv) {
    by_dtype!(op.qkv.dtype(), split_qkv_of(op));
}

fn split_qkv_of<T: Real>(op: SplitQkv) {
    let width = op.qkv.dims()[1];
    let (qkv, rows) = (op.qkv.slice::<T>(), (CHUNK / width).max(1));
    let parts = parts(width, op.kv_widths, op.turn).into_iter();
    for ((columns, turn), out) in parts.zip([op.q, op.k, op.v]) {
        let Some(out) = out else { continue };
        let tasks = out.slice_mut::<T>().par_chunks_mut(rows * columns.len());
        let tasks = tasks.zip(qkv.par_chunks(rows * width)).enumerate();
        tasks.for_each(|(task, (out, qkv))| {
            let tokens = out.chunks_exact_mut(columns.len());
            for (row, (out, qkv)) in tokens.zip(qkv.chunks_exact(width)).enumerate() {
                copy_turned(out, &qkv[columns.clone()], turn, task * rows + row, false);
            }
        });
    }
}

pub(super) fn join_qkv(mut op: JoinQkv) {
    by_dtype!(op.qkv.dtype(), join_qkv_of(&mut op));
    find_largest(op.largest, op.qkv.as_in());
}

fn join_qkv_of<T: Real>(op: &mut JoinQkv) {
    let (width, kv_widths) = (op.qkv.dims()[1], [op.k.dims()[1], op.v.dims()[1]]);
    let rows = (CHUNK / width).max(1);
    let given = [op.q, op.k, op.v].map(|part| part.slice::<T>());
    let parts = parts(width, kv_widths, op.turn);
    let qkv = op.qkv.reborrow();
    let tasks = qkv.slice_mut::<T>().par_chunks_mut(rows * width);
    tasks.enumerate().for_each(|(task, qkv)| {
        for (row, qkv) in qkv.chunks_exact_mut(width).enumerate() {
            let token = task * rows + row;
            for ((columns, turn), x) in parts.iter().zip(given) {
                let x = &x[token * columns.len()..(token + 1) * columns.len()];
                copy_turned(&mut qkv[columns.clone()], x, *turn, token, true);
            }
        }
    });
}
