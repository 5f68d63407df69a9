//! Attention over cached keys and values.

use super::attention::capped;
use super::dispatch::by_dtype;
use super::simd::{Real, exp, lane_sum, vectorized};
use super::{part, shared};
use crate::AttentionShape;
use crate::operation::{CACHE_BLOCK, CachedAttention, StoreInCache};
use memory::{In, Out};
use rayon::prelude::*;
use std::ops::Range;

/// Columns of a head whose values are summed at a time. A wider head computes its scores again for each further part.
const COLUMNS: usize = 256;

/// Where the tokens of all sequences lie in a cache.
#[derive(Clone, Copy)]
struct Places<'a> {
    table: &'a [i32],
    /// Blocks per sequence in the table.
    blocks: usize,
    lengths: &'a [i32],
    /// New tokens of each sequence.
    new: usize,
}

impl<'a> Places<'a> {
    fn new(table: In<'a>, lengths: In<'a>, rows: usize) -> Places<'a> {
        Places {
            table: table.slice(),
            blocks: table.dims()[1],
            lengths: lengths.slice(),
            new: rows / table.dims()[0],
        }
    }

    /// The blocks of the sequence that row `row` of the new tokens belongs to, and the token's position. None if the
    /// position is negative.
    fn of_row(&self, row: usize) -> Option<(&'a [i32], usize)> {
        let sequence = row / self.new;
        let position = self.lengths[sequence] as usize + row % self.new;
        let blocks = &self.table[sequence * self.blocks..][..self.blocks];
        Some((blocks, position.checked_sub(self.new)?))
    }
}

pub(super) fn store_in_cache(op: StoreInCache) {
    by_dtype!(op.k.dtype(), store_in_cache_of(op));
}

fn store_in_cache_of<T: Real>(op: StoreInCache) {
    let places = Places::new(op.table, op.lengths, op.k.dims()[0]);
    let (k_width, v_width) = (op.k.dims()[1], op.v.dims()[1]);
    let (k, v) = (op.k.slice::<T>(), op.v.slice::<T>());
    let rows = k.chunks_exact(k_width).zip(v.chunks_exact(v_width));
    let k_cache = op.k_cache.slice_mut::<T>();
    let mut v_cache = op.v_cache.map(Out::slice_mut::<T>);
    for (row, (k, v)) in rows.enumerate() {
        let Some((blocks, position)) = places.of_row(row) else {
            continue;
        };
        let block = blocks[position / CACHE_BLOCK] as usize;
        let slot = block * CACHE_BLOCK + position % CACHE_BLOCK;
        match &mut v_cache {
            Some(v_cache) => {
                k_cache[slot * k_width..][..k_width].copy_from_slice(k);
                v_cache[slot * v_width..][..v_width].copy_from_slice(v);
            }
            None => {
                let both = k_cache[slot * (k_width + v_width)..].split_at_mut(k_width);
                both.0.copy_from_slice(k);
                both.1[..v_width].copy_from_slice(v);
            }
        }
    }
}

pub(super) fn cached_attention(op: CachedAttention) {
    by_dtype!(op.q.dtype(), cached_attention_of(op));
}

/// A task computes one head of one new token.
fn cached_attention_of<T: Real>(op: CachedAttention) {
    let (rows, [qk_dim, v_dim]) = (op.q.dims()[0], op.shape.head_dims());
    let (heads, kv_heads) = (op.shape.heads, op.shape.kv_heads);
    let places = Places::new(op.table, op.lengths, rows);
    let (q, k) = (op.q.slice::<T>(), op.k_cache.slice::<T>());
    let sinks = op.sinks.map(|sinks| sinks.slice::<T>());
    let (v, v_stride) = match op.v_cache {
        Some(v_cache) => (v_cache.slice::<T>(), v_dim),
        None => (k, qk_dim),
    };
    let out = shared::<T>(op.out);
    (0..rows * heads).into_par_iter().for_each(|task| {
        let (row, head) = (task / heads, task % heads);
        // SAFETY: these columns of this row belong to this task.
        let out = unsafe { part(out, task * v_dim, v_dim) };
        let Some((blocks, position)) = places.of_row(row) else {
            return out.fill(T::narrow(0.0));
        };
        let keys = Keys {
            k,
            v,
            blocks,
            count: position + 1,
            first: (position + 1).saturating_sub(op.shape.window.unwrap_or(usize::MAX)),
            kv_heads,
            head: head / op.shape.group(),
            strides: [qk_dim, v_stride],
        };
        let q = &q[task * qk_dim..][..qk_dim];
        let sink = sinks.map(|sinks| sinks[head].widen());
        for (part, out) in out.chunks_mut(COLUMNS).enumerate() {
            attend(out, q, &keys, part * COLUMNS, op.shape, sink);
        }
    });
}

/// The keys and values that a query of one head sees.
struct Keys<'a, T> {
    k: &'a [T],
    v: &'a [T],
    blocks: &'a [i32],
    /// The number of keys up to the query's own, and the first key that it sees.
    count: usize,
    first: usize,
    /// Heads of a token in the cache, which of them it is, and how far apart they are in k and in v.
    kv_heads: usize,
    head: usize,
    strides: [usize; 2],
}

impl<T> Keys<'_, T> {
    /// Where the head's elements of a token begin, in the cache of keys and in that of values.
    #[inline(always)]
    fn at(&self, slot: usize) -> [usize; 2] {
        self.strides
            .map(|stride| (slot * self.kv_heads + self.head) * stride)
    }

    /// The first slot of the block `index`, and the tokens in it that the query sees.
    #[inline(always)]
    fn block(&self, index: usize) -> (usize, Range<usize>) {
        let start = self.blocks[index] as usize * CACHE_BLOCK;
        let first = index * CACHE_BLOCK;
        let seen = self.first.saturating_sub(first)..CACHE_BLOCK.min(self.count - first);
        (start, seen)
    }
}

vectorized! {
    /// Columns of the output from `first` on: an online softmax, a block of keys at a time.
    fn attend<T: Real>(
        out: &mut [T],
        q: &[T],
        keys: &Keys<T>,
        first: usize,
        shape: AttentionShape,
        sink: Option<f32>,
    ) {
        let scale = shape.scale();
        let mut sums = [0.0f32; COLUMNS];
        let sums = &mut sums[..out.len()];
        let (mut largest, mut total) = (f32::NEG_INFINITY, 0.0f32);
        let blocks = keys.first / CACHE_BLOCK..keys.count.div_ceil(CACHE_BLOCK);
        for index in blocks.clone() {
            let (start, seen) = keys.block(index);
            let mut weights = [f32::NEG_INFINITY; CACHE_BLOCK];
            for (token, score) in seen.clone().zip(&mut weights[seen.clone()]) {
                let k = &keys.k[keys.at(start + token)[0]..][..q.len()];
                *score = capped(lane_sum([q, k], |[q, k]| q * k) * scale, shape.cap);
            }
            let before = largest;
            for score in weights {
                largest = if score > largest { score } else { largest };
            }
            let rescale = if index == blocks.start { 0.0 } else { exp(before - largest) };
            total *= rescale;
            sums.iter_mut().for_each(|sum| *sum *= rescale);
            for (token, score) in seen.clone().zip(&weights[seen]) {
                let weight = exp(score - largest);
                total += weight;
                let v = &keys.v[keys.at(start + token)[1] + first..][..sums.len()];
                for (sum, v) in sums.iter_mut().zip(v) {
                    *sum += weight * v.widen();
                }
            }
        }
        if let Some(sink) = sink {
            let top = largest.max(sink);
            let rescale = exp(largest - top);
            total = total * rescale + exp(sink - top);
            sums.iter_mut().for_each(|sum| *sum *= rescale);
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = T::narrow(*sum / total);
        }
    }
}
