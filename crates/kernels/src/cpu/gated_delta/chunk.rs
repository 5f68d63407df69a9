//! A chunk of tokens: its documents, its gates, and its rows.

use super::{Documents, row, sigmoid};
use crate::cpu::simd::{Real, exp, lane_sum, vectorized};
use crate::operation::{DELTA_CHUNK, DeltaShape};
use memory::In;

pub(super) const C: usize = DELTA_CHUNK;

/// The inputs of a layer, which all its chunks read.
#[derive(Clone, Copy)]
pub(super) struct DeltaLayer<'a> {
    pub(super) shape: DeltaShape,
    pub(super) documents: Documents<'a>,
    pub(super) mixed: In<'a>,
    pub(super) b: In<'a>,
    pub(super) a: In<'a>,
    pub(super) a_log: &'a [f32],
    pub(super) dt_bias: &'a [f32],
}

impl DeltaLayer<'_> {
    /// Where the states of a key head's value heads in front of a chunk begin among those that are kept, if they are.
    pub(super) fn place_of_states(
        &self,
        [sequence, key_head]: [usize; 2],
        chunk: usize,
    ) -> Option<usize> {
        let shape = self.shape;
        let heads =
            (sequence * shape.kept_states() + chunk / shape.state_interval) * shape.value_heads;
        let first = heads + key_head * shape.group();
        let is_kept = chunk.is_multiple_of(shape.state_interval);
        is_kept.then(|| first * shape.key_dim * shape.value_dim)
    }
}

/// A chunk of a sequence.
#[derive(Clone, Copy)]
pub(super) struct DeltaChunk {
    /// Its first token, of all sequences.
    pub(super) first: usize,
    pub(super) tokens: usize,
    /// The first token of each token's document.
    documents: [usize; C],
}

/// The gates of a chunk for a value head.
pub(super) struct Gates {
    /// The logarithm of each token's decay.
    pub(super) g: [f32; C],
    pub(super) beta: [f32; C],
    /// Running sums of `g` in each document. They may be large, and small differences of them count.
    c: [f64; C],
    /// The factor on the state in front at each token, and the factor on each token at the end of the chunk.
    pub(super) from_front: [f32; C],
    pub(super) to_end: [f32; C],
    /// The factor on the state in front at the end of the chunk.
    pub(super) all: f32,
}

impl DeltaChunk {
    /// A chunk of a sequence, by its number there.
    pub(super) fn new(layer: &DeltaLayer, sequence: usize, number: usize) -> DeltaChunk {
        let seq = layer.shape.seq;
        let first = sequence * seq + number * C;
        let tokens = C.min(seq - number * C);
        let mut documents = [0; C];
        for (token, document) in documents[..tokens].iter_mut().enumerate() {
            *document = layer.documents.first(first + token);
        }
        DeltaChunk {
            first,
            tokens,
            documents,
        }
    }

    /// The first token of a token's document that is in the chunk.
    fn document(&self, token: usize) -> usize {
        self.documents[token].saturating_sub(self.first)
    }

    /// Whether the next token is another document's, or of no chunk.
    pub(super) fn is_last(&self, token: usize) -> bool {
        token + 1 == self.tokens || self.documents[token] != self.documents[token + 1]
    }

    pub(super) fn gates<T: Real>(&self, layer: &DeltaLayer, head: usize) -> Gates {
        let mut gates = Gates {
            g: [0.0; C],
            beta: [0.0; C],
            c: [0.0; C],
            from_front: [0.0; C],
            to_end: [0.0; C],
            all: 0.0,
        };
        let mut sum = 0.0;
        for token in 0..self.tokens {
            let at = self.first + token;
            let a = row::<T>(&layer.a, at)[head].widen() + layer.dt_bias[head];
            gates.g[token] = -layer.a_log[head].exp() * softplus(a);
            gates.beta[token] = T::narrow(sigmoid(row::<T>(&layer.b, at)[head].widen())).widen();
            if self.documents[token] == at {
                sum = 0.0;
            }
            sum += f64::from(gates.g[token]);
            gates.c[token] = sum;
            // Its document began before the chunk.
            if self.documents[token] < self.first {
                gates.from_front[token] = (sum as f32).exp();
            }
        }
        let last = self.tokens - 1;
        let own = self.document(last)..self.tokens;
        decays(&mut gates.to_end[own.clone()], gates.c[last], &gates.c[own]);
        gates.all = gates.from_front[last];
        gates
    }

    /// `D`: what is left of each token at those behind it, in rows of [`C`]. Nothing of other documents' tokens, nor of those behind.
    pub(super) fn decays(&self, gates: &Gates, d: &mut [f32]) {
        for (token, row) in d.chunks_exact_mut(C).take(self.tokens).enumerate() {
            let own = self.document(token)..token + 1;
            row[..own.start].fill(0.0);
            row[own.end..].fill(0.0);
            decays(&mut row[own.clone()], gates.c[token], &gates.c[own]);
        }
    }
}

vectorized! {
    fn decays(out: &mut [f32], at: f64, from: &[f64]) {
        out.iter_mut().zip(from).for_each(|(out, from)| *out = exp((at - from) as f32));
    }
}

pub(crate) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

impl DeltaLayer<'_> {
    /// The columns of a key head's queries and of its keys, and of a value head's values.
    pub(super) fn columns(&self, key_head: usize, value_head: usize) -> [usize; 3] {
        let DeltaShape {
            key_heads,
            key_dim,
            value_dim,
            ..
        } = self.shape;
        let keys = key_heads * key_dim;
        [
            key_head * key_dim,
            keys + key_head * key_dim,
            2 * keys + value_head * value_dim,
        ]
    }

    /// Reads normed queries, times `key_dim^-1/2`, and keys, `[tokens, key_dim]`. Returns what each row was multiplied with, without that.
    pub(super) fn load_keys<T: Real>(
        &self,
        chunk: &DeltaChunk,
        key_head: usize,
        rows: [&mut [f32]; 2],
    ) -> [[f32; C]; 2] {
        let width = self.shape.key_dim;
        let [queries, keys, _] = self.columns(key_head, 0);
        let of = [(queries, (width as f32).sqrt().recip()), (keys, 1.0)];
        let mut norms = [[0.0; C]; 2];
        for ((rows, (first, factor)), norms) in rows.into_iter().zip(of).zip(&mut norms) {
            for (token, out) in rows.chunks_exact_mut(width).take(chunk.tokens).enumerate() {
                let x = &row::<T>(&self.mixed, chunk.first + token)[first..first + width];
                norms[token] = (lane_sum([x], |[x]| x * x) + 1e-6).sqrt().recip();
                for (out, x) in out.iter_mut().zip(x) {
                    *out = x.widen() * norms[token] * factor;
                }
            }
        }
        norms
    }

    pub(super) fn load_values<T: Real>(&self, chunk: &DeltaChunk, head: usize, v: &mut [f32]) {
        let [_, _, first] = self.columns(0, head);
        chunk.load::<T>(&self.mixed, first, v, self.shape.value_dim);
    }
}

impl DeltaChunk {
    /// Reads some columns of the chunk's rows.
    pub(super) fn load<T: Real>(&self, x: &In, first: usize, out: &mut [f32], width: usize) {
        for (token, out) in out.chunks_exact_mut(width).take(self.tokens).enumerate() {
            let x = &row::<T>(x, self.first + token)[first..first + width];
            out.iter_mut().zip(x).for_each(|(out, x)| *out = x.widen());
        }
    }
}
