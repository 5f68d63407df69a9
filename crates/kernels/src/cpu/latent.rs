//! Latent attention: the rotary embedding of the last columns of heads, and keys and values from one latent a token.

use super::dispatch::by_dtype;
use super::positions::position;
use super::simd::{CHUNK, Real};
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
    let (width, half) = (x.dims()[1], table.dims()[2]);
    let rows = (CHUNK / width).max(1);
    let (cosines, sines) = table.slice::<f32>().split_at(table.elements() / 2);
    let sign = if inverse { -1.0 } else { 1.0 };
    // The columns of a pair, within the turned part of a head.
    let pair = |at: usize| match are_neighbours {
        true => (2 * at, 2 * at + 1),
        false => (at, at + half),
    };
    let tasks = x.slice_mut::<T>().par_chunks_mut(rows * width);
    tasks.enumerate().for_each(|(task, x)| {
        for (row, x) in x.chunks_exact_mut(width).enumerate() {
            let first = position(positions, task * rows + row) * half;
            for head in x.chunks_exact_mut(head_dim) {
                let turned = &mut head[head_dim - 2 * half..];
                for at in 0..half {
                    let (cosine, sine) = (cosines[first + at], sign * sines[first + at]);
                    let (low, high) = pair(at);
                    let (a, b) = (turned[low].widen(), turned[high].widen());
                    turned[low] = T::narrow(a * cosine - b * sine);
                    turned[high] = T::narrow(b * cosine + a * sine);
                }
            }
        }
    });
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
    let (of_kv, turned) = (kv.dims()[1] / heads, k_rotary.dims()[1]);
    let own = match (&k, &v) {
        (Some(k), _) => k.dims()[1] / heads - turned,
        (None, Some(v)) => of_kv - v.dims()[1] / heads,
        (None, None) => unreachable!("the check before asks for one"),
    };
    let (kv, k_rotary) = (kv.slice::<T>(), k_rotary.slice::<T>());
    if let Some(k) = k {
        let width = heads * (own + turned);
        let rows = k.slice_mut::<T>().par_chunks_exact_mut(width);
        rows.enumerate().for_each(|(token, k)| {
            let kv = kv[token * heads * of_kv..].chunks_exact(of_kv);
            for (k, kv) in k.chunks_exact_mut(own + turned).zip(kv) {
                let (first, shared) = k.split_at_mut(own);
                first.copy_from_slice(&kv[..own]);
                shared.copy_from_slice(&k_rotary[token * turned..][..turned]);
            }
        });
    }
    if let Some(v) = v {
        let width = of_kv - own;
        let rows = v.slice_mut::<T>().par_chunks_exact_mut(heads * width);
        rows.zip(kv.par_chunks_exact(heads * of_kv))
            .for_each(|(v, kv)| {
                for (v, kv) in v.chunks_exact_mut(width).zip(kv.chunks_exact(of_kv)) {
                    v.copy_from_slice(&kv[own..]);
                }
            });
    }
}

pub(super) fn expand_keys_backward(operation: ExpandKeysBackward) {
    by_dtype!(operation.dkv.dtype(), expand_keys_backward_of(operation));
}

fn expand_keys_backward_of<T: Real>(operation: ExpandKeysBackward) {
    let ExpandKeysBackward {
        dkv,
        dk_rotary,
        dk,
        dv,
        heads,
    } = operation;
    let (of_kv, turned) = (dkv.dims()[1] / heads, dk_rotary.dims()[1]);
    let (of_k, of_v) = (dk.dims()[1] / heads, dv.dims()[1] / heads);
    let own = of_kv - of_v;
    let outputs = dkv.slice_mut::<T>().par_chunks_exact_mut(heads * of_kv);
    let outputs = outputs.zip(dk_rotary.slice_mut::<T>().par_chunks_exact_mut(turned));
    let inputs = dk.slice::<T>().par_chunks_exact(heads * of_k);
    let inputs = inputs.zip(dv.slice::<T>().par_chunks_exact(heads * of_v));
    outputs
        .zip(inputs)
        .for_each(|((dkv, dk_rotary), (dk, dv))| {
            let mut sums = vec![0.0f32; turned];
            let made = dk.chunks_exact(of_k).zip(dv.chunks_exact(of_v));
            for (dkv, (dk, dv)) in dkv.chunks_exact_mut(of_kv).zip(made) {
                dkv[..own].copy_from_slice(&dk[..own]);
                dkv[own..].copy_from_slice(dv);
                for (sum, part) in sums.iter_mut().zip(&dk[own..]) {
                    *sum += part.widen();
                }
            }
            for (out, sum) in dk_rotary.iter_mut().zip(sums) {
                *out = T::narrow(sum);
            }
        });
}
