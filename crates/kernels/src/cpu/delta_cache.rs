//! Layers of the gated delta rule while tokens are generated.

use super::dispatch::by_dtype;
use super::gated_delta::{COLUMNS, row, sigmoid, softplus};
use super::short_convolution::add_tap;
use super::simd::{Real, lane_sum, vectorized};
use super::{Shared, part, shared};
use crate::operation::{CachedConvolution, CachedDelta, DeltaShape};
use memory::In;
use rayon::prelude::*;
use std::ops::Range;

/// Which of `seq` rows is a sequence's first token, and how many tokens it has in front of these rows.
fn first_and_earlier(length: i32, seq: usize) -> [usize; 2] {
    let length = length as usize;
    [seq.saturating_sub(length), length.saturating_sub(seq)]
}

pub(super) fn cached_convolution(op: CachedConvolution) {
    by_dtype!(op.x.dtype(), convolve(op));
}

fn convolve<T: Real>(op: CachedConvolution) {
    let (lengths, columns) = (op.lengths.slice::<i32>(), op.out.dims()[1]);
    let seq = op.out.dims()[0] / lengths.len();
    let (taps, blocks) = (op.weight.dims()[1], columns.div_ceil(COLUMNS));
    let (out, before, weight) = (
        shared::<T>(op.out),
        shared::<T>(op.before),
        op.weight.slice::<T>(),
    );
    let tasks = (0..lengths.len() * blocks).into_par_iter();
    tasks.for_each(|task| {
        let (sequence, first) = (task / blocks, task % blocks * COLUMNS);
        let own = SomeColumns {
            out,
            before,
            x: op.x,
            rows: [sequence * seq, sequence * (taps - 1)],
            columns,
            first,
            width: COLUMNS.min(columns - first),
            taps,
        };
        own.convolve(&weight[first * taps..], seq, lengths[sequence]);
        own.keep_last(seq, lengths[sequence]);
    });
}

/// Some columns of a sequence, which are one task's alone.
struct SomeColumns<'a, T> {
    out: Shared<T>,
    before: Shared<T>,
    x: In<'a>,
    /// The sequence's first rows of x, and of `before`.
    rows: [usize; 2],
    /// All columns of a row.
    columns: usize,
    first: usize,
    width: usize,
    taps: usize,
}

impl<'a, T: Real> SomeColumns<'a, T> {
    fn kept(&self, place: usize) -> &'a mut [T] {
        let first = (self.rows[1] + place) * self.columns + self.first;
        // SAFETY: these columns are the task's alone, which holds one row of them that it writes.
        unsafe { part(self.before, first, self.width) }
    }

    /// A row by its place in `before`, followed by x.
    fn row(&self, place: usize) -> &'a [T] {
        match place.checked_sub(self.taps - 1) {
            Some(token) => {
                &row::<T>(&self.x, self.rows[0] + token)[self.first..self.first + self.width]
            }
            None => self.kept(place),
        }
    }

    fn convolve(&self, weight: &[T], seq: usize, length: i32) {
        let [begin, earlier] = first_and_earlier(length, seq);
        for token in 0..seq {
            let first = (self.rows[0] + token) * self.columns + self.first;
            // SAFETY: these columns are the task's alone.
            let out = unsafe { part(self.out, first, self.width) };
            let seen = (token + 1).saturating_sub(begin) + earlier;
            let mut sums = [0.0; COLUMNS];
            for back in 0..self.taps.min(seen) {
                let x = self.row(token + self.taps - 1 - back);
                add_tap(&mut sums, x, weight, [self.taps, self.taps - 1 - back]);
            }
            for (out, u) in out.iter_mut().zip(sums) {
                *out = T::narrow(u * sigmoid(u));
            }
        }
    }

    /// The last rows take the place of those before; zeros where the sequence has no tokens.
    fn keep_last(&self, seq: usize, length: i32) {
        let kept = self.taps - 1;
        let missing = kept.saturating_sub(length as usize);
        for place in 0..kept {
            // A row that is read lies behind all that were written.
            match place < missing {
                true => self.kept(place).fill(T::narrow(0.0)),
                false => self.kept(place).copy_from_slice(self.row(place + seq)),
            }
        }
    }
}

pub(super) fn cached_delta(op: CachedDelta) {
    by_dtype!(op.mixed.dtype(), cached_delta_of(op));
}

/// A task has a value head of a sequence.
fn cached_delta_of<T: Real>(op: CachedDelta) {
    let shape = op.shape;
    let (heads, width) = (shape.value_heads, shape.value_dim);
    let (lengths, out) = (op.lengths.slice::<i32>(), shared::<T>(op.out));
    let [a_log, dt_bias] = [op.a_log, op.dt_bias].map(In::slice::<f32>);
    let states = op.states.slice_mut::<f32>();
    let states = states.par_chunks_mut(shape.key_dim * width).enumerate();
    states.for_each(|(task, state)| {
        let (sequence, head) = (task / heads, task % heads);
        let [begin, earlier] = first_and_earlier(lengths[sequence], shape.seq);
        if earlier == 0 {
            state.fill(0.0);
        }
        let rate = a_log[head].exp();
        for token in 0..shape.seq {
            let at = sequence * shape.seq + token;
            // SAFETY: a value head's columns are this task's alone.
            let out = unsafe { part(out, (at * heads + head) * width, width) };
            if token < begin {
                out.fill(T::narrow(0.0));
                continue;
            }
            let gate = |of: &In| row::<T>(of, at)[head].widen();
            let decay = (-rate * softplus(gate(&op.a) + dt_bias[head])).exp();
            let beta = T::narrow(sigmoid(gate(&op.b))).widen();
            let mixed = row::<T>(&op.mixed, at);
            let of = columns(shape, head).map(|columns| &mixed[columns]);
            step(state, out, of, [decay, beta]);
        }
    });
}

/// The columns of a value head's queries, keys and values.
fn columns(shape: DeltaShape, head: usize) -> [Range<usize>; 3] {
    let (keys, width) = (shape.key_heads * shape.key_dim, shape.value_dim);
    let query = head / shape.group() * shape.key_dim;
    let value = 2 * keys + head * width;
    let key_columns = |first: usize| first..first + shape.key_dim;
    [
        key_columns(query),
        key_columns(keys + query),
        value..value + width,
    ]
}

/// Value columns whose sums a token's step has at a time.
const TILE: usize = 64;

vectorized! {
    /// A token's change of a head's state, `S = decay S; S += k (beta (v - S^T k))^T`, and its output, `S^T q`.
    fn step<T: Real>(state: &mut [f32], out: &mut [T], of: [&[T]; 3], gates: [f32; 2]) {
        let ([q, k, v], [decay, beta], width) = (of, gates, out.len());
        let norms = [q, k].map(|x| 1.0 / (lane_sum([x], |[x]| x * x) + 1e-6).sqrt());
        let [query_norm, key_norm] = [norms[0] / (k.len() as f32).sqrt(), norms[1]];
        for first in (0..width).step_by(TILE) {
            let own = first..width.min(first + TILE);
            let [mut change, mut sums] = [[0.0f32; TILE]; 2];
            for (state, k) in state.chunks_exact(width).zip(k) {
                let k = k.widen() * key_norm;
                for (sum, state) in change.iter_mut().zip(&state[own.clone()]) {
                    *sum += k * state;
                }
            }
            for (change, v) in change.iter_mut().zip(&v[own.clone()]) {
                *change = beta * (v.widen() - decay * *change);
            }
            for (state, (k, q)) in state.chunks_exact_mut(width).zip(k.iter().zip(q)) {
                let (k, q) = (k.widen() * key_norm, q.widen() * query_norm);
                let columns = state[own.clone()].iter_mut().zip(&change);
                for ((state, change), sum) in columns.zip(&mut sums) {
                    *state = decay * *state + k * change;
                    *sum += q * *state;
                }
            }
            for (out, sum) in out[own].iter_mut().zip(sums) {
                *out = T::narrow(sum);
            }
        }
    }
}
