//! Causal attention that never stores the scores, in blocks of queries by blocks of keys.
//!
//! The GEMM library reads the left operand of a product in any layout. The right one it reads in place only if rows are
//! contiguous; otherwise it copies. So the operand that must be transposed is the one that stays the same over many
//! blocks. The forward pass transposes queries, goes over keys, and has scores `[keys, queries]`. The backward pass
//! transposes keys and values, goes over queries, and has scores `[queries, keys]`.
//!
//! A task's results depend only on its place in the tensors, not on the thread or the part of the scratch.

mod backward;
mod forward;

pub(super) use backward::flash_attention_backward;
pub(super) use forward::flash_attention;

use super::attention::Task;
use super::dropout::{Mask, drop_elements};
use super::gemm::Matrix;
use super::simd::Real;
use super::{Shared, part};
use crate::{AttentionShape, FlashOptions};
use memory::{DType, In};
use rayon::prelude::*;

/// Queries in a block: whole vectors, and as many rows as the GEMM library multiplies with a right operand
/// that it does not copy first (eight panels of six, with AVX-512).
pub(crate) const QUERIES: usize = 48;

/// Keys in a block: the block of scores and what it is multiplied with stay in the second-level cache.
const KEYS: usize = 128;

/// Parts of scratch, and so the most tasks at a time. It is a constant, since scratch must not depend on the
/// number of threads.
const SLOTS: usize = 32;

/// Parts of scratch: one per task, up to a limit.
pub(crate) fn slots(tasks: usize) -> usize {
    tasks.min(SLOTS)
}

/// Queries and keys of the largest block; queries in whole vectors.
fn block_sizes(shape: AttentionShape) -> (usize, usize) {
    let queries = QUERIES.min(shape.seq.next_multiple_of(16));
    (queries, KEYS.min(shape.seq))
}

/// Elements of f32 copies, which only other types need.
fn widened(dtype: DType, elements: usize) -> usize {
    if dtype == DType::F32 { 0 } else { elements }
}

/// Scratch of one task of the forward pass: scores, sums of out, three statistics, transposed q; k and v.
pub(crate) fn forward_scratch(shape: AttentionShape, dtype: DType) -> usize {
    let (queries, keys) = block_sizes(shape);
    let dims = shape.qk_head_dim + shape.v_head_dim;
    keys * queries + queries * dims + 3 * queries + widened(dtype, keys * dims)
}

/// Scratch of one task of the backward pass: scores and their gradients, sums of dk and dv, transposed k and
/// v, row sums; q, dout, k and the sums of dq.
pub(crate) fn backward_scratch(shape: AttentionShape, dtype: DType) -> usize {
    let (queries, keys) = block_sizes(shape);
    let rows = shape.group() * shape.seq;
    let dims = shape.qk_head_dim + shape.v_head_dim;
    let copies = queries * dims + (keys + rows) * shape.qk_head_dim;
    2 * keys * queries + 2 * keys * dims + rows + widened(dtype, copies)
}

/// The inputs of both passes.
#[derive(Clone, Copy)]
struct Inputs<'a, T> {
    shape: AttentionShape,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    documents: Option<&'a [i32]>,
    mask: Option<Mask>,
}

impl<'a, T: Real> Inputs<'a, T> {
    fn new([q, k, v]: [In<'a>; 3], shape: AttentionShape, options: FlashOptions<'a>) -> Self {
        Inputs {
            shape,
            q: q.slice(),
            k: k.slice(),
            v: v.slice(),
            documents: options.documents.map(|documents| documents.slice()),
            mask: Mask::of(options.dropout),
        }
    }

    /// The `index`-th key-value head, counted over all sequences.
    fn task(&self, index: usize) -> Task {
        Task {
            shape: self.shape,
            sequence: index / self.shape.kv_heads,
            kv_head: index % self.shape.kv_heads,
        }
    }

    /// The first key that each query of a block sees, by its document or its window. None if it is 0 for all.
    fn first_keys(&self, block: Block) -> Option<[i32; QUERIES]> {
        let (query, queries) = block.queries;
        if self.documents.is_none() && !self.shape.is_windowed() {
            return None;
        }
        let mut first_keys = [0; QUERIES];
        if let Some(documents) = self.documents {
            let row = block.task.sequence * self.shape.seq + query;
            first_keys[..queries].copy_from_slice(&documents[row..row + queries]);
        }
        for (query, first) in (query..query + queries).zip(&mut first_keys) {
            *first = (*first).max(self.shape.first_in_window(query) as i32);
        }
        Some(first_keys)
    }

    /// The first key that any query of a block sees.
    fn first_key(&self, block: Block) -> usize {
        let (query, queries) = block.queries;
        let first_keys = self.first_keys(block);
        let first = first_keys.and_then(|keys| keys[..queries].iter().copied().min());
        first.map_or(0, |first| query.min(first as usize))
    }

    /// The index of an element of the probabilities `[b, heads, s, s]`, by which it is dropped.
    fn element(&self, block: Block, query: usize, key: usize) -> u64 {
        let seq = self.shape.seq as u64;
        let row = block.task.sequence * self.shape.heads + block.head;
        (row as u64 * seq + query as u64) * seq + key as u64
    }
}

/// A block of scores: its query head, and the first and the number of its queries and of its keys.
#[derive(Clone, Copy)]
struct Block {
    task: Task,
    head: usize,
    queries: (usize, usize),
    keys: (usize, usize),
}

impl Block {
    /// Offset of the first query's element in a `[b, heads, s]` tensor.
    fn statistics_offset(&self) -> usize {
        let AttentionShape { heads, seq, .. } = self.task.shape;
        (self.task.sequence * heads + self.head) * seq + self.queries.0
    }
}

/// Runs every item with a part of the scratch: item `i` gets part `i` modulo the number of parts.
fn for_each_item(items: usize, scratch: &mut [f32], run: impl Fn(usize, &mut [f32]) + Sync) {
    let slots = slots(items);
    let each = scratch.len() / slots.max(1);
    let scratch = Shared(scratch.as_mut_ptr());
    (0..slots).into_par_iter().with_max_len(1).for_each(|slot| {
        // SAFETY: this task alone has the piece `slot`.
        let scratch = unsafe { part(scratch, slot * each, each) };
        (slot..items)
            .step_by(slots)
            .for_each(|item| run(item, scratch));
    });
}

/// The transpose of `rows` rows of `columns`, as f32 rows that lie `stride` apart.
///
/// # Safety
/// The rows must lie in a live tensor that nobody writes.
unsafe fn transpose<T: Real>(
    source: *const T,
    source_stride: usize,
    (rows, columns): (usize, usize),
    copy: &mut [f32],
    stride: usize,
) -> Matrix {
    // Goes by tiles, so that each cache line is used up while it is in the cache.
    const TILE: usize = 16;
    for first_column in (0..columns).step_by(TILE) {
        for first_row in (0..rows).step_by(TILE) {
            let rows = first_row..(first_row + TILE).min(rows);
            for column in first_column..(first_column + TILE).min(columns) {
                let copy = &mut copy[column * stride..][rows.clone()];
                for (row, value) in rows.clone().zip(copy) {
                    // SAFETY: the caller's promise.
                    *value = unsafe { *source.wrapping_add(row * source_stride + column) }.widen();
                }
            }
        }
    }
    Matrix::rows(copy.as_ptr(), stride)
}
