//! Latent attention (DeepSeek-V2, 2024): heads that are turned in part, and keys and values of one latent.

use super::dispatch::by_dtype;
use super::rotary::{angles, rotate};
use super::simd::{CHUNK, Real, vectorized};
use crate::operation::{ExpandKeys, ExpandKeysBackward, RotaryTail};
use rayon::prelude::*;

pub(super) fn rotary_tail(operation: RotaryTail) {
    by_dtype!(operation.x.dtype(), rotary_tail_of(operation));
}

fn rotary_tail_of<T: Real>(operation: RotaryTail) {
    let RotaryTail {
        x,
        head_dim,
        table,
        positions,
        are_neighbours,
        inverse,
    } = operation;
    let (width, unturned) = (x.dims()[1], head_dim - 2 * table.dims()[2]);
    let rows = (CHUNK / width).max(1);
    let tasks = x.slice_mut::<T>().par_chunks_mut(rows * width);
    tasks.enumerate().for_each(|(task, x)| {
        for (token, x) in (task * rows..).zip(x.chunks_exact_mut(width)) {
            let [cosines, sines] = angles(table, positions, token);
            for head in x.chunks_exact_mut(head_dim) {
                let tail = &mut head[unturned..];
                match are_neighbours {
                    true => rotate_neighbours(tail, cosines, sines, inverse),
                    false => rotate(tail, cosines, sines, inverse),
                }
            }
        }
    });
}

vectorized! {
    fn rotate_neighbours<T: Real>(x: &mut [T], cosines: &[f32], sines: &[f32], inverse: bool) {
        let sign = if inverse { -1.0 } else { 1.0 };
        let (pairs, _) = x.as_chunks_mut::<2>();
        for (pair, (cosine, sine)) in pairs.iter_mut().zip(cosines.iter().zip(sines)) {
            let ([a, b], sine) = (pair.map(T::widen), sign * sine);
            *pair = [a * cosine - b * sine, b * cosine + a * sine].map(T::narrow);
        }
    }
}

pub(super) fn expand_keys(operation: ExpandKeys) {
    by_dtype!(operation.kv.dtype(), expand_keys_of(operation));
}

fn expand_keys_of<T: Real>(operation: ExpandKeys) {
    let ExpandKeys {
        k,
        v,
        kv,
        k_rotary,
        heads,
    } = operation;
    let (both, turned) = (kv.dims()[1] / heads, k_rotary.dims()[1]);
    let (kv, k_rotary) = (kv.slice::<T>(), k_rotary.slice::<T>());
    // The heads of all tokens in a row.
    if let Some(k) = k {
        let head = k.dims()[1] / heads;
        let tasks = k.slice_mut::<T>().par_chunks_mut(head).enumerate();
        tasks.for_each(|(index, k)| {
            let (own, shared) = k.split_at_mut(head - turned);
            own.copy_from_slice(&kv[index * both..][..own.len()]);
            shared.copy_from_slice(&k_rotary[index / heads * turned..][..turned]);
        });
    }
    if let Some(v) = v {
        let head = v.dims()[1] / heads;
        let tasks = v.slice_mut::<T>().par_chunks_mut(head);
        let tasks = tasks.zip(kv.par_chunks(both));
        tasks.for_each(|(v, kv)| v.copy_from_slice(&kv[both - head..]));
    }
}

pub(super) fn expand_keys_backward(operation: ExpandKeysBackward) {
    by_dtype!(operation.dk.dtype(), expand_keys_backward_of(operation));
}

fn expand_keys_backward_of<T: Real>(operation: ExpandKeysBackward) {
    let ExpandKeysBackward {
        dkv,
        dk_rotary,
        dk,
        dv,
        heads,
    } = operation;
    let [width, k_width, v_width] = [dkv.dims()[1], dk.dims()[1], dv.dims()[1]];
    let (head, v_head, turned) = (k_width / heads, v_width / heads, dk_rotary.dims()[1]);
    let (dk, dv) = (dk.slice::<T>(), dv.slice::<T>());
    let tokens = dkv.slice_mut::<T>().par_chunks_mut(width);
    let tokens = tokens.zip(dk_rotary.slice_mut::<T>().par_chunks_mut(turned));
    let given = dk.par_chunks(k_width).zip(dv.par_chunks(v_width));
    tokens.zip(given).for_each(|((dkv, dk_rotary), (dk, dv))| {
        let outs = dkv.chunks_exact_mut(width / heads);
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
