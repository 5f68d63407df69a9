//! The rule itself, chunk by chunk.

use super::chunk::{C, DeltaChunk, DeltaLayer, Gates};
use super::products::{SmallMatrix, add_product, add_times, multiply, scale, scale_rows, take};
use super::{Documents, OutRows};
use crate::cpu::dispatch::by_dtype;
use crate::cpu::simd::Real;
use crate::cpu::{Shared, part};
use crate::operation::{DeltaShape, GatedDelta};
use rayon::prelude::*;

/// Tokens that are solved for one by one, before a product takes them out of those behind.
pub(super) const SOLVED: usize = 16;

/// Room for a chunk of a key head.
pub(super) struct DeltaRoom<'a> {
    dims: [usize; 2],
    pub(super) q: &'a mut [f32],
    pub(super) k: &'a mut [f32],
    /// Rows of queries or keys, each times a factor.
    pub(super) scaled: &'a mut [f32],
    /// `K K^T`, `Q K^T`, and of a value head `D`, `A` and `P`: matrices of [`C`] columns, with zeros above the diagonal.
    pub(super) kk: &'a mut [f32],
    pub(super) qk: &'a mut [f32],
    pub(super) d: &'a mut [f32],
    pub(super) a: &'a mut [f32],
    pub(super) p: &'a mut [f32],
    pub(super) v: &'a mut [f32],
    /// `V - e K S`; then the output.
    pub(super) rest: &'a mut [f32],
    pub(super) n: &'a mut [f32],
}

/// The f32 elements of a chunk's room.
pub(super) fn room(shape: DeltaShape) -> usize {
    3 * C * (shape.key_dim + shape.value_dim) + 5 * C * C
}

/// The f32 elements of scratch of a sequence's key head.
pub(crate) fn scratch(shape: DeltaShape) -> usize {
    room(shape) + shape.group() * shape.key_dim * shape.value_dim
}

/// Rows of keys or queries, or of values.
pub(super) type Factors = [f32; C];

impl<'a> DeltaRoom<'a> {
    pub(super) fn of(shape: DeltaShape, scratch: &mut &'a mut [f32]) -> DeltaRoom<'a> {
        let dims = [shape.key_dim, shape.value_dim];
        let [keys, values] = dims.map(|width| C * width);
        let mut take = |elements| take(scratch, elements);
        DeltaRoom {
            dims,
            q: take(keys),
            k: take(keys),
            scaled: take(keys),
            kk: take(C * C),
            qk: take(C * C),
            d: take(C * C),
            a: take(C * C),
            p: take(C * C),
            v: take(values),
            rest: take(values),
            n: take(values),
        }
    }

    pub(super) fn load_keys<T: Real>(
        &mut self,
        layer: &DeltaLayer,
        chunk: &DeltaChunk,
        key_head: usize,
    ) -> [Factors; 2] {
        let norms = layer.load_keys::<T>(chunk, key_head, [self.q, self.k]);
        let [q, k] = [&*self.q, &*self.k].map(|x| SmallMatrix::rows(x, chunk.tokens, self.dims[0]));
        multiply(self.kk, C, [k, k.t()], 1.0);
        multiply(self.qk, C, [q, k.t()], 1.0);
        norms
    }

    /// Finds `A`, `P` and `N` of a value head, with the state in front.
    pub(super) fn solve(&mut self, chunk: &DeltaChunk, gates: &Gates, state: &[f32]) {
        chunk.decays(gates, self.d);
        for token in 0..chunk.tokens {
            let own = token * C..token * C + chunk.tokens;
            let of = self.d[own.clone()].iter().zip(&self.qk[own.clone()]);
            for (p, (d, qk)) in self.p[own.clone()].iter_mut().zip(of) {
                *p = d * qk;
            }
            let of = self.d[own.clone()].iter().zip(&self.kk[own.clone()]);
            for (a, (d, kk)) in self.a[own].iter_mut().zip(of) {
                *a = gates.beta[token] * d * kk;
            }
            self.a[token * C + token] = 0.0;
        }
        let ([key_dim, width], tokens) = (self.dims, chunk.tokens);
        let (keys, state) = (
            SmallMatrix::rows(self.k, tokens, key_dim),
            SmallMatrix::rows(state, key_dim, width),
        );
        multiply(self.rest, width, [keys, state], 1.0);
        for token in 0..tokens {
            let own = token * width..(token + 1) * width;
            let rest = self.rest[own.clone()].iter_mut().zip(&self.v[own.clone()]);
            for (n, (rest, v)) in self.n[own].iter_mut().zip(rest) {
                *rest = v - gates.from_front[token] * *rest;
                *n = gates.beta[token] * *rest;
            }
        }
        solve_rows(self.n, self.a, tokens, width);
    }

    /// Replaces the states of a key head's value heads in front of a chunk by those behind it, and may write its outputs.
    pub(super) fn go_through<T: Real>(
        &mut self,
        layer: &DeltaLayer,
        chunk: &DeltaChunk,
        key_head: usize,
        states: &mut [f32],
        out: Option<OutRows<T>>,
    ) {
        let (shape, [key_dim, width]) = (layer.shape, self.dims);
        self.load_keys::<T>(layer, chunk, key_head);
        let of_heads = states.chunks_exact_mut(key_dim * width);
        for (head, state) in (key_head * shape.group()..).zip(of_heads) {
            let gates = chunk.gates::<T>(layer, head);
            layer.load_values::<T>(chunk, head, self.v);
            self.solve(chunk, &gates, state);
            if let Some(out) = out {
                self.find_outputs(chunk, &gates, state);
                // SAFETY: a value head's columns are this task's alone.
                unsafe { out.store(chunk, head * width, self.rest, width) };
            }
            self.step(chunk, &gates, state);
        }
    }

    /// The state behind a chunk, from the one in front.
    fn step(&mut self, chunk: &DeltaChunk, gates: &Gates, state: &mut [f32]) {
        let ([key_dim, width], tokens) = (self.dims, chunk.tokens);
        scale(state, gates.all);
        scale_rows(self.scaled, &gates.to_end[..tokens], self.k, key_dim);
        let (keys, n) = (
            SmallMatrix::rows(self.scaled, tokens, key_dim),
            SmallMatrix::rows(self.n, tokens, width),
        );
        add_product(state, width, [keys.t(), n], 1.0);
    }

    /// `O = e Q S + P N`, in the place of `rest`.
    fn find_outputs(&mut self, chunk: &DeltaChunk, gates: &Gates, state: &[f32]) {
        let ([key_dim, width], tokens) = (self.dims, chunk.tokens);
        scale_rows(self.scaled, &gates.from_front[..tokens], self.q, key_dim);
        let (queries, state) = (
            SmallMatrix::rows(self.scaled, tokens, key_dim),
            SmallMatrix::rows(state, key_dim, width),
        );
        multiply(self.rest, width, [queries, state], 1.0);
        let p = SmallMatrix::part(self.p, [tokens; 2], C);
        let n = SmallMatrix::rows(self.n, tokens, width);
        add_product(self.rest, width, [p, n], 1.0);
    }
}

/// `(1 + A) N = R`, in the place of `R`.
fn solve_rows(n: &mut [f32], a: &[f32], tokens: usize, width: usize) {
    for first in (0..tokens).step_by(SOLVED) {
        let end = tokens.min(first + SOLVED);
        let (before, own) = n.split_at_mut(first * width);
        if first > 0 {
            let a = SmallMatrix::part(&a[first * C..], [end - first, first], C);
            let before = SmallMatrix::rows(before, first, width);
            add_product(own, width, [a, before], -1.0);
        }
        for token in first..end {
            let (before, own) = own.split_at_mut((token - first) * width);
            for (from, before) in (first..token).zip(before.chunks_exact(width)) {
                add_times(&mut own[..width], -a[token * C + from], before);
            }
        }
    }
}

pub(crate) fn gated_delta(op: GatedDelta) {
    by_dtype!(op.mixed.dtype(), gated_delta_of(op));
}

fn gated_delta_of<T: Real>(op: GatedDelta) {
    let shape = op.shape;
    let layer = DeltaLayer {
        shape,
        documents: Documents::of(shape.seq, op.documents),
        mixed: op.mixed,
        b: op.b,
        a: op.a,
        a_log: op.a_log.slice(),
        dt_bias: op.dt_bias.slice(),
    };
    let out = op.out.map(|out| OutRows::<T>::of(&out));
    let states = op
        .states
        .map(|states| Shared(states.pointer().cast::<f32>()));
    let tasks = op.scratch.slice_mut().par_chunks_mut(scratch(shape));
    tasks.enumerate().for_each(|(task, scratch)| {
        let at = [task / shape.key_heads, task % shape.key_heads];
        of_key_head::<T>(&layer, at, scratch, (out, states));
    });
}

/// A sequence's key head, with its value heads in order.
fn of_key_head<T: Real>(
    layer: &DeltaLayer,
    [sequence, key_head]: [usize; 2],
    mut scratch: &mut [f32],
    (out, states): (Option<OutRows<T>>, Option<Shared<f32>>),
) {
    let shape = layer.shape;
    let mut room = DeltaRoom::of(shape, &mut scratch);
    scratch.fill(0.0);
    for number in 0..shape.chunks() {
        if let Some((states, place)) =
            states.zip(layer.place_of_states([sequence, key_head], number))
        {
            // SAFETY: the states are this task's alone.
            unsafe { part(states, place, scratch.len()) }.copy_from_slice(scratch);
        }
        let chunk = DeltaChunk::new(layer, sequence, number);
        room.go_through(layer, &chunk, key_head, scratch, out);
    }
}

impl<T: Real> OutRows<T> {
    /// Writes some columns of a chunk's rows.
    ///
    /// # Safety
    /// They lie in the output, and no other task touches them.
    pub(super) unsafe fn store(self, chunk: &DeltaChunk, first: usize, x: &[f32], width: usize) {
        for (token, x) in x.chunks_exact(width).take(chunk.tokens).enumerate() {
            // SAFETY: the caller's promise.
            let out = unsafe { self.columns(chunk.first + token, first, width) };
            out.iter_mut()
                .zip(x)
                .for_each(|(out, x)| *out = T::narrow(*x));
        }
    }
}
