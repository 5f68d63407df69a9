//! Latent attention (DeepSeek-V2, 2024): heads that are turned in part, and keys and values of one latent.

use super::dispatch::by_dtype;
use super::rotary::{angles, rotate};
use super::simd::{CHUNK, Real, vectorized};
use crate::operation::{ExpandKeys, ExpandKeysBackward, RotaryTail};
use rayon::prelude::*;

pub(super) fn rotary_tail(op: RotaryTail) {
    by_dtype!(op.x.dtype(), rotary_tail_of(op));
}

fn rotary_tail_of<T: Real>(op: RotaryTail) {
    let (width, unturned) = (op.x.dims()[1], op.head_dim - 2 * op.table.dims()[2]);
    let rows = (CHUNK / width).max(1);
    let tasks = op.x.slice_mut::<T>().par_chunks_mut(rows * width);
    tasks.enumerate().for_each(|(task, x)| {
        for (token, x) in (task * rows..).zip(x.chunks_exact_mut(width)) {
            let angles = angles(op.table, op.positions, token);
            for head in x.chunks_exact_mut(op.head_dim) {
                let tail = &mut head[unturned..];
                match op.are_neighbours {
                    true => rotate_neighbours(tail, angles, op.inverse),
                    false => rotate(tail, tail.len(), angles, op.inverse),
                }
            }
        }
    });
}

vectorized! {
    fn rotate_neighbours<T: Real>(x: &mut [T], angles: [&[f32]; 2], inverse: bool) {
        let [cosines, sines] = angles;
        let sign = if inverse { -1.0 } else { 1.0 };
        let (pairs, _) = x.as_chunks_mut::<2>();
        for (pair, (cosine, sine)) in pairs.iter_mut().zip(cosines.iter().zip(sines)) {
            let ([a, b], sine) = (pair.map(T::widen), sign * sine);
            *pair = [a * cosine - b * sine, b * cosine + a * sine].map(T::narrow);
        }
    }
}

pub(super) fn expand_keys(op: ExpandKeys) {
    by_dtype!(op.kv.dtype(), expand_keys_of(op));
}

fn expand_keys_of<T: Real>(op: ExpandKeys) {
    let (both, turned) = (op.kv.dims()[1] / op.heads, op.k_rotary.dims()[1]);
    let (kv, k_rotary) = (op.kv.slice::<T>(), op.k_rotary.slice::<T>());
    // The heads of all tokens in a row.
    if let Some(k) = op.k {
        let head = k.dims()[1] / op.heads;
        let tasks = k.slice_mut::<T>().par_chunks_mut(head).enumerate();
        tasks.for_each(|(index, k)| {
            let (own, shared) = k.split_at_mut(head - turned);
            own.copy_from_slice(&kv[index * both..][..own.len()]);
            shared.copy_from_slice(&k_rotary[index / op.heads * turned..][..turned]);
        });
    }
    if let Some(v) = op.v {
        let head = v.dims()[1] / op.heads;
        let tasks = v.slice_mut::<T>().par_chunks_mut(head);
        let tasks = tasks.zip(kv.par_chunks(both));
        tasks.for_each(|(v, kv)| v.copy_from_slice(&kv[both - head..]));
    }
}

pub(super) fn expand_keys_backward(op: ExpandKeysBackward) {
    by_dtype!(op.dk.dtype(), expand_keys_backward_of(op));
}

fn expand_keys_backward_of<T: Real>(op: ExpandKeysBackward) {
    let [width, k_width, v_width] = [op.dkv.dims()[1], op.dk.dims()[1], op.dv.dims()[1]];
    let (head, v_head, turned) = (
        k_width / op.heads,
        v_width / op.heads,
        op.dk_rotary.dims()[1],
    );
    let (dk, dv) = (op.dk.slice::<T>(), op.dv.slice::<T>());
    let tokens = op.dkv.slice_mut::<T>().par_chunks_mut(width);
    let tokens = tokens.zip(op.dk_rotary.slice_mut::<T>().par_chunks_mut(turned));
    let given = dk.par_chunks(k_width).zip(dv.par_chunks(v_width));
    tokens.zip(given).for_each(|((dkv, dk_rotary), (dk, dv))| {
        let outs = dkv.chunks_exact_mut(width / op.heads);
        let parts = dk.chunks_exact(head).zip(dv.chunks_exact(v_head));
        for (out, (dk, dv)) in outs.zip(parts) {
            let (own, values) = out.split_at_mut(head - turned);
            own.copy_from_slice(&dk[..head - turned]);
            values.copy_from_slice(dv);
        }
        for (column, out) in (head - turned..).zip(dk_rotary) {
            let of_heads = dk[column..].iter().step_by(head);
            *out = T::narrow(of_heads.map(|dk| dk.widen()).sum());
        }
    });
}
