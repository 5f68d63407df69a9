//! Gradients of the rule, from the last chunk to the first. Some states in front of chunks are given, and those between are made again.

use super::chunk::{C, DeltaChunk, DeltaLayer, Gates};
use super::forward::{DeltaRoom, Factors, SOLVED, room};
use super::products::{
    SmallMatrix, add_product, add_times, dot, multiply, scale, scale_rows, take,
};
use super::{Documents, OutRows, row, sigmoid};
use crate::cpu::dispatch::by_dtype;
use crate::cpu::overwrites;
use crate::cpu::simd::{Real, lane_sum};
use crate::operation::{DeltaShape, GatedDeltaBackward};
use memory::{In, Out};
use rayon::prelude::*;
use std::ops::Range;

/// The f32 elements of scratch of a sequence's key head, with the sums for the gradients of its value heads' `a_log` and `dt_bias`.
pub(crate) fn scratch(shape: DeltaShape) -> usize {
    let DeltaShape {
        key_dim, value_dim, ..
    } = shape;
    let own = 5 * C * key_dim + 2 * C * value_dim + 2 * C * C;
    let states = 1 + made_again(shape);
    room(shape) + own + shape.group() * (states * key_dim * value_dim + 2)
}

/// The most chunks between states that are kept.
fn made_again(shape: DeltaShape) -> usize {
    shape.state_interval.min(shape.chunks()) - 1
}

pub(crate) fn gated_delta_backward(op: GatedDeltaBackward) {
    by_dtype!(op.mixed.dtype(), backward_of(op));
}

fn backward_of<T: Real>(op: GatedDeltaBackward) {
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
    let given = Given {
        dout: op.dout,
        states: op.states.slice(),
        dmixed: OutRows::<T>::of(&op.dmixed),
        db: OutRows::of(&op.db),
        da: OutRows::of(&op.da),
    };
    let each = scratch(shape);
    let scratch = op.scratch.slice_mut::<f32>();
    let tasks = scratch.par_chunks_mut(each).enumerate();
    tasks.for_each(|(task, scratch)| {
        let at = [task / shape.key_heads, task % shape.key_heads];
        OfKeyHead::new(&layer, given, at, scratch).run();
    });
    let group = shape.group();
    let gradients = [(op.da_log, op.da_log_init), (op.ddt_bias, op.ddt_bias_init)];
    for (number, (gradient, init)) in gradients.into_iter().enumerate() {
        let sum_of = |head: usize| {
            let of_sequence = |sequence: usize| {
                let task = sequence * shape.key_heads + head / group;
                scratch[(task + 1) * each - 2 * group + number * group + head % group]
            };
            (0..shape.batch).map(of_sequence).sum::<f32>()
        };
        let replace = overwrites(&init);
        by_dtype!(gradient.dtype(), add_sums(gradient, replace, sum_of));
    }
}

fn add_sums<G: Real>(gradient: Out, replace: bool, sum_of: impl Fn(usize) -> f32) {
    for (head, gradient) in gradient.slice_mut::<G>().iter_mut().enumerate() {
        let before = if replace { 0.0 } else { gradient.widen() };
        *gradient = G::narrow(before + sum_of(head));
    }
}

/// Inputs and outputs of the backward pass.
#[derive(Clone, Copy)]
struct Given<'a, T> {
    dout: In<'a>,
    states: &'a [f32],
    dmixed: OutRows<T>,
    db: OutRows<T>,
    da: OutRows<T>,
}

/// The backward pass of a sequence's key head, with its value heads in order.
struct OfKeyHead<'a, T> {
    layer: &'a DeltaLayer<'a>,
    given: Given<'a, T>,
    sequence: usize,
    key_head: usize,
    room: DeltaRoom<'a>,
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    /// `dO S^T`, `-dV S^T` and `N dS^T`.
    of_states: [&'a mut [f32]; 3],
    dout: &'a mut [f32],
    dn: &'a mut [f32],
    /// Gradients of `A` and `P`, with zeros above the diagonal.
    da: &'a mut [f32],
    dp: &'a mut [f32],
    /// The gradients of the states behind the chunk, one for each value head.
    dstates: &'a mut [f32],
    /// The states in front of a segment's chunks, but for the first.
    made_again: &'a mut [f32],
    /// The gradients of `a_log` of all value heads, then those of `dt_bias`.
    sums: &'a mut [f32],
}

/// A value head in a chunk: its number, its place among those of the key head, its gates, and the state in front.
struct Head<'a> {
    number: usize,
    place: usize,
    gates: Gates,
    state: &'a [f32],
}

impl<'a, T: Real> OfKeyHead<'a, T> {
    fn new(
        layer: &'a DeltaLayer<'a>,
        given: Given<'a, T>,
        [sequence, key_head]: [usize; 2],
        mut scratch: &'a mut [f32],
    ) -> OfKeyHead<'a, T> {
        let shape = layer.shape;
        let (keys, values) = (C * shape.key_dim, C * shape.value_dim);
        let room = DeltaRoom::of(shape, &mut scratch);
        let mut take = |elements| take(&mut scratch, elements);
        OfKeyHead {
            layer,
            given,
            sequence,
            key_head,
            room,
            dq: take(keys),
            dk: take(keys),
            of_states: [take(keys), take(keys), take(keys)],
            dout: take(values),
            dn: take(values),
            da: take(C * C),
            dp: take(C * C),
            dstates: take(shape.group() * shape.key_dim * shape.value_dim),
            made_again: take(made_again(shape) * shape.group() * shape.key_dim * shape.value_dim),
            sums: take(2 * shape.group()),
        }
    }

    fn run(mut self) {
        self.dstates.fill(0.0);
        self.sums.fill(0.0);
        let made_again = std::mem::take(&mut self.made_again);
        for segment in self.layer.shape.segments().rev() {
            let first = self.make_states(segment.clone(), made_again);
            let behind = segment.len() - 1;
            let states = made_again.chunks_exact(first.len()).take(behind);
            for (number, states) in (segment.start + 1..segment.end).zip(states).rev() {
                self.of_chunk(number, states);
            }
            self.of_chunk(segment.start, first);
        }
    }

    /// Makes the states in front of a segment's chunks, of all value heads, from the first, which it returns.
    fn make_states(&mut self, segment: Range<usize>, states: &mut [f32]) -> &'a [f32] {
        let layer = self.layer;
        let place = layer.place_of_states([self.sequence, self.key_head], segment.start);
        let first = &self.given.states[place.expect("a segment begins with a state")..];
        let first = &first[..layer.shape.group() * self.size()];
        let mut before = first;
        for (number, next) in
            (segment.start..segment.end - 1).zip(states.chunks_exact_mut(first.len()))
        {
            next.copy_from_slice(before);
            let chunk = DeltaChunk::new(layer, self.sequence, number);
            self.room
                .go_through::<T>(layer, &chunk, self.key_head, next, None);
            before = next;
        }
        first
    }

    fn of_chunk(&mut self, number: usize, states: &[f32]) {
        let chunk = DeltaChunk::new(self.layer, self.sequence, number);
        let norms = self.room.load_keys::<T>(self.layer, &chunk, self.key_head);
        self.dq.fill(0.0);
        self.dk.fill(0.0);
        for (place, state) in states.chunks_exact(self.size()).enumerate() {
            self.of_value_head(&chunk, place, state);
        }
        self.write_key_gradients(&chunk, norms);
    }

    fn of_value_head(&mut self, chunk: &DeltaChunk, place: usize, state: &[f32]) {
        let shape = self.layer.shape;
        let number = self.key_head * shape.group() + place;
        let head = &Head {
            number,
            place,
            gates: chunk.gates::<T>(self.layer, number),
            state,
        };
        let width = shape.value_dim;
        self.layer.load_values::<T>(chunk, number, self.room.v);
        self.room.solve(chunk, &head.gates, head.state);
        chunk.load::<T>(&self.given.dout, number * width, self.dout, width);
        self.find_dn(chunk, head);
        self.find_gradients_of_scores(chunk);
        let dbeta = self.gradients_of_values(chunk, head);
        self.multiply_states(chunk, head);
        let dc = self.gradients_of_decay(chunk, head);
        self.add_gradients_of_keys(chunk, &head.gates);
        self.write_gates(chunk, head, [dbeta, dc]);
        self.step_back(chunk, head);
    }

    /// Elements of a state.
    fn size(&self) -> usize {
        self.layer.shape.key_dim * self.layer.shape.value_dim
    }

    fn dstate(&self, head: &Head) -> &[f32] {
        &self.dstates[head.place * self.size()..][..self.size()]
    }

    /// `dN = P^T dO + r K dS`, then `dR` in its place: `(1 + A)^T dR = dN`.
    fn find_dn(&mut self, chunk: &DeltaChunk, head: &Head) {
        let DeltaShape {
            key_dim, value_dim, ..
        } = self.layer.shape;
        let tokens = chunk.tokens;
        let to_end = &head.gates.to_end[..tokens];
        scale_rows(self.room.scaled, to_end, self.room.k, key_dim);
        let keys = SmallMatrix::rows(self.room.scaled, tokens, key_dim);
        let dstate = &self.dstates[head.place * self.size()..];
        let dstate = SmallMatrix::rows(dstate, key_dim, value_dim);
        multiply(self.dn, value_dim, [keys, dstate], 1.0);
        let p = SmallMatrix::part(self.room.p, [tokens; 2], C);
        let dout = SmallMatrix::rows(self.dout, tokens, value_dim);
        add_product(self.dn, value_dim, [p.t(), dout], 1.0);
        solve_transposed(self.dn, self.room.a, tokens, value_dim);
    }

    /// `dP = tril(dO N^T)`, `dA = -strict(dR N^T)`.
    fn find_gradients_of_scores(&mut self, chunk: &DeltaChunk) {
        let (tokens, width) = (chunk.tokens, self.layer.shape.value_dim);
        let [dout, dr, n] =
            [&*self.dout, &*self.dn, &*self.room.n].map(|x| SmallMatrix::rows(x, tokens, width));
        multiply(self.dp, C, [dout, n.t()], 1.0);
        multiply(self.da, C, [dr, n.t()], -1.0);
        for token in 0..tokens {
            self.dp[token * C + token + 1..(token + 1) * C].fill(0.0);
            self.da[token * C + token..(token + 1) * C].fill(0.0);
        }
    }

    /// Gradients of `beta`, and `dV = beta dR`, which is written and takes the place of `V`.
    fn gradients_of_values(&mut self, chunk: &DeltaChunk, head: &Head) -> Factors {
        let (tokens, width) = (chunk.tokens, self.layer.shape.value_dim);
        let mut dbeta = [0.0; C];
        for (token, dbeta) in dbeta[..tokens].iter_mut().enumerate() {
            let own = token * width..(token + 1) * width;
            let scores = token * C..token * C + token;
            let of = [&*self.da, &*self.room.kk, &*self.room.d].map(|x| &x[scores.clone()]);
            let through_a = lane_sum(of, |[da, kk, d]| da * kk * d);
            *dbeta = dot(&self.dn[own.clone()], &self.room.rest[own]) + through_a;
        }
        scale_rows(self.room.v, &head.gates.beta[..tokens], self.dn, width);
        let [_, _, first] = self.layer.columns(0, head.number);
        // SAFETY: a value head's columns are this task's alone.
        unsafe { self.given.dmixed.store(chunk, first, self.room.v, width) };
        dbeta
    }

    fn multiply_states(&mut self, chunk: &DeltaChunk, head: &Head) {
        let DeltaShape {
            key_dim, value_dim, ..
        } = self.layer.shape;
        let dstate = &self.dstates[head.place * self.size()..];
        let [state, dstate] =
            [head.state, dstate].map(|x| SmallMatrix::rows(x, key_dim, value_dim));
        let [dout, dv, n] = [&*self.dout, &*self.room.v, &*self.room.n]
            .map(|x| SmallMatrix::rows(x, chunk.tokens, value_dim));
        let [qe, ke, kr] = &mut self.of_states;
        multiply(qe, key_dim, [dout, state.t()], 1.0);
        multiply(ke, key_dim, [dv, state.t()], -1.0);
        multiply(kr, key_dim, [n, dstate.t()], 1.0);
    }

    /// Gradients of the running sums of gates: `X = dA A + dP P`, `dc = rows(X) - columns(X) + e (Qe Q + Ke K) - s`, `s = r Kr K`, and at the
    /// last token also the sum of `s` and `e^(c_C) <dS, S>`.
    fn gradients_of_decay(&self, chunk: &DeltaChunk, head: &Head) -> Factors {
        let (tokens, width, gates) = (chunk.tokens, self.layer.shape.key_dim, &head.gates);
        let mut dc = [0.0; C];
        let mut to_last = gates.all * dot(self.dstate(head), head.state);
        for token in 0..tokens {
            let own = token * width..(token + 1) * width;
            let [q, k] = [&self.room.q[own.clone()], &self.room.k[own.clone()]];
            let [qe, ke, kr] = self.of_states.each_ref().map(|of| &of[own.clone()]);
            let s = gates.to_end[token] * dot(kr, k);
            dc[token] += gates.from_front[token] * (dot(qe, q) + dot(ke, k)) - s;
            to_last += s;
            for from in 0..token {
                let at = token * C + from;
                let x = self.da[at] * self.room.a[at] + self.dp[at] * self.room.p[at];
                dc[token] += x;
                dc[from] -= x;
            }
        }
        dc[tokens - 1] += to_last;
        dc
    }

    /// Adds to `dQ = e Qe + L K` and `dK = e Ke + r Kr + (M + M^T) K + L^T Q`, with `M = beta dA D` in the place of `dA`, `L = dP D` in that of
    /// `dP`.
    fn add_gradients_of_keys(&mut self, chunk: &DeltaChunk, gates: &Gates) {
        let (tokens, width) = (chunk.tokens, self.layer.shape.key_dim);
        for token in 0..tokens {
            let own = token * width..(token + 1) * width;
            let [qe, ke, kr] = self.of_states.each_ref().map(|of| &of[own.clone()]);
            add_times(&mut self.dq[own.clone()], gates.from_front[token], qe);
            add_times(&mut self.dk[own.clone()], gates.from_front[token], ke);
            add_times(&mut self.dk[own], gates.to_end[token], kr);
            for from in 0..=token {
                let (at, d) = (token * C + from, self.room.d[token * C + from]);
                self.dp[at] *= d;
                self.da[at] *= gates.beta[token] * d;
                self.da[from * C + token] = self.da[at];
            }
        }
        let [l, both] = [&*self.dp, &*self.da].map(|x| SmallMatrix::part(x, [tokens; 2], C));
        let [q, k] = [&*self.room.q, &*self.room.k].map(|x| SmallMatrix::rows(x, tokens, width));
        add_product(self.dq, width, [l, k], 1.0);
        add_product(self.dk, width, [l.t(), q], 1.0);
        add_product(self.dk, width, [both, k], 1.0);
    }

    /// Gradients of `b`, `a`, `a_log` and `dt_bias` from those of `beta` and of running sums.
    fn write_gates(&mut self, chunk: &DeltaChunk, head: &Head, [dbeta, dc]: [Factors; 2]) {
        let (layer, number) = (self.layer, head.number);
        let [mut sum_of_g, mut sum_of_a, mut dg] = [0.0; 3];
        for token in (0..chunk.tokens).rev() {
            let at = chunk.first + token;
            dg = dc[token] + if chunk.is_last(token) { 0.0 } else { dg };
            let a = row::<T>(&layer.a, at)[number].widen() + layer.dt_bias[number];
            let da = -dg * layer.a_log[number].exp() * sigmoid(a);
            let beta = sigmoid(row::<T>(&layer.b, at)[number].widen());
            let db = dbeta[token] * beta * (1.0 - beta);
            // SAFETY: a value head's column is this task's alone.
            unsafe {
                self.given.da.columns(at, number, 1)[0] = T::narrow(da);
                self.given.db.columns(at, number, 1)[0] = T::narrow(db);
            }
            sum_of_g += dg * head.gates.g[token];
            sum_of_a += da;
        }
        self.sums[head.place] += sum_of_g;
        self.sums[layer.shape.group() + head.place] += sum_of_a;
    }

    /// `dS = (e Q)^T dO - (e K)^T dV + e^(c_C) dS`.
    fn step_back(&mut self, chunk: &DeltaChunk, head: &Head) {
        let DeltaShape {
            key_dim, value_dim, ..
        } = self.layer.shape;
        let (tokens, size) = (chunk.tokens, self.size());
        let dstate = &mut self.dstates[head.place * size..][..size];
        scale(dstate, head.gates.all);
        let of = [
            (&*self.room.q, &*self.dout, 1.0),
            (&*self.room.k, &*self.room.v, -1.0),
        ];
        for (keys, gradients, sign) in of {
            let front = &head.gates.from_front[..tokens];
            scale_rows(self.room.scaled, front, keys, key_dim);
            let keys = SmallMatrix::rows(self.room.scaled, tokens, key_dim);
            let gradients = SmallMatrix::rows(gradients, tokens, value_dim);
            add_product(dstate, value_dim, [keys.t(), gradients], sign);
        }
    }

    /// Through the norms of queries and keys: `dx = r (dy - y (y dy))`.
    fn write_key_gradients(&mut self, chunk: &DeltaChunk, norms: [Factors; 2]) {
        let width = self.layer.shape.key_dim;
        let [queries, keys, _] = self.layer.columns(self.key_head, 0);
        let root = (width as f32).sqrt();
        let of = [
            (&mut *self.dq, &*self.room.q, queries, root),
            (&mut *self.dk, &*self.room.k, keys, 1.0),
        ];
        for ((dx, y, first, root), norms) in of.into_iter().zip(norms) {
            let rows = dx.chunks_exact_mut(width).zip(y.chunks_exact(width));
            for ((dx, y), norm) in rows.zip(norms).take(chunk.tokens) {
                // y has the scale of scores, which its norm does not see: y root is the normed row.
                let along = dot(dx, y) * root * root;
                add_times(dx, -along, y);
                scale(dx, norm / root);
            }
            // SAFETY: a key head's columns are this task's alone.
            unsafe { self.given.dmixed.store(chunk, first, dx, width) };
        }
    }
}

/// `(1 + A)^T dR = dN`, in the place of `dN`.
fn solve_transposed(dn: &mut [f32], a: &[f32], tokens: usize, width: usize) {
    for first in (0..tokens).step_by(SOLVED).rev() {
        let end = tokens.min(first + SOLVED);
        for token in (first..end).rev() {
            let (before, own) = dn.split_at_mut(token * width);
            let before = before[first * width..].chunks_exact_mut(width);
            for (from, before) in (first..token).zip(before) {
                add_times(before, -a[token * C + from], &own[..width]);
            }
        }
        if first > 0 {
            let a = SmallMatrix::part(&a[first * C..], [end - first, first], C);
            let (before, own) = dn.split_at_mut(first * width);
            let own = SmallMatrix::rows(own, end - first, width);
            add_product(before, width, [a.t(), own], -1.0);
        }
    }
}
