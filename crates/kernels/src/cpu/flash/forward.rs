//! The forward pass: online softmax over blocks of keys (Milakov and Gimelshein 2018; Dao et al. 2022).

use super::{Block, Inputs, KEYS, QUERIES, block_sizes, drop_elements, for_each_item, transpose};
use crate::cpu::Shared;
use crate::cpu::attention::{Pieces, capped, panel};
use crate::cpu::dispatch::by_dtype;
use crate::cpu::gemm::{Matrix, Output, product};
use crate::cpu::simd::{LANES, Real, exp, vectorized};
use crate::operation::FlashAttention;
use crate::{AttentionShape, Positive};

pub(in crate::cpu) fn flash_attention(op: FlashAttention) {
    by_dtype!(op.q.dtype(), flash_attention_of(op));
}

fn flash_attention_of<T: Real>(op: FlashAttention) {
    let out = op.out.map(|out| Shared(out.pointer().cast::<T>()));
    let lse = op.lse.map(|lse| Shared(lse.pointer().cast::<f32>()));
    let inputs = Inputs::<T>::new([op.q, op.k, op.v], op.shape, op.options);
    let heads = op.shape.batch * op.shape.kv_heads;
    let sinks = op.sinks.map(|sinks| sinks.slice::<T>());
    let blocks = op.shape.seq.div_ceil(QUERIES);
    for_each_item(heads * blocks, op.scratch.slice_mut(), |item, scratch| {
        let task = inputs.task(item % heads);
        // The last queries see the most keys. They go first, so that no thread has a long item left at the end.
        let first = (blocks - 1 - item / heads) * QUERIES;
        let queries = QUERIES.min(op.shape.seq - first);
        let mut room = ForwardScratch::new::<T>(op.shape, scratch);
        for head in task.heads() {
            let block = Block {
                task,
                head,
                queries: (first, queries),
                keys: (0, first + queries),
            };
            let sink = sinks.map(|sinks| sinks[head].widen());
            attend(&inputs, block, sink, out, &mut room);
            if let Some(lse) = lse {
                // SAFETY: the statistics of these queries of this head belong to this task.
                unsafe { room.store_lse(lse.at(block.statistics_offset()), queries) };
            }
        }
    });
}

/// A task's scratch: a block of scores, the sums of its queries so far, and widened copies.
struct ForwardScratch<'a> {
    /// `[keys, queries]`.
    scores: &'a mut [f32],
    /// `[queries, e]`: values weighted by e^(score - largest).
    sums: &'a mut [f32],
    largest: &'a mut [f32],
    /// Sum of the weights.
    total: &'a mut [f32],
    /// What the sums must be multiplied by since `largest` grew.
    rescale: &'a mut [f32],
    /// The queries transposed, `[d, queries]`.
    q: &'a mut [f32],
    k_copy: &'a mut [f32],
    v_copy: &'a mut [f32],
}

impl<'a> ForwardScratch<'a> {
    fn new<T: Real>(shape: AttentionShape, scratch: &'a mut [f32]) -> ForwardScratch<'a> {
        let (queries, keys) = block_sizes(shape);
        let mut pieces = Pieces(scratch);
        ForwardScratch {
            scores: pieces.take(keys * queries),
            sums: pieces.take(queries * shape.v_head_dim),
            largest: pieces.take(queries),
            total: pieces.take(queries),
            rescale: pieces.take(queries),
            q: pieces.take(queries * shape.qk_head_dim),
            k_copy: pieces.take_if(T::WIDEN, keys * shape.qk_head_dim),
            v_copy: pieces.take_if(T::WIDEN, keys * shape.v_head_dim),
        }
    }

    /// Adds a sink to what each query has seen: a weight without a value. Sums of `dim` values follow, if they are wanted.
    fn join_sink(&mut self, sink: f32, dim: Option<usize>) {
        let statistics = self.largest.iter_mut().zip(&mut *self.total);
        for ((largest, total), rescale) in statistics.zip(&mut *self.rescale) {
            let before = *largest;
            *largest = before.max(sink);
            *rescale = weight(before, *largest);
            *total = *total * *rescale + weight(sink, *largest);
        }
        if let Some(dim) = dim {
            rescale_rows(self.sums, self.rescale, dim);
        }
    }

    /// Logarithms of the sums of e^score.
    ///
    /// # Safety
    /// `lse` must start `queries` live elements that only this task touches.
    unsafe fn store_lse(&self, lse: *mut f32, queries: usize) {
        // SAFETY: the caller's promise.
        let lse = unsafe { std::slice::from_raw_parts_mut(lse, queries) };
        for ((lse, largest), total) in lse.iter_mut().zip(&*self.largest).zip(&*self.total) {
            *lse = largest + total.ln();
        }
    }

    /// The weighted means of the values, rounded into the output.
    ///
    /// # Safety
    /// `out` must start `queries` live rows, `stride` apart, whose first `dim` elements only this task touches.
    unsafe fn store_out<T: Real>(&self, out: *mut T, stride: usize, queries: usize, dim: usize) {
        let rows = self.sums.chunks_exact(dim).zip(&*self.total);
        for (row, (sums, total)) in rows.take(queries).enumerate() {
            // SAFETY: the caller's promise.
            let out =
                unsafe { std::slice::from_raw_parts_mut(out.wrapping_add(row * stride), dim) };
            let factor = 1.0 / total;
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = T::narrow(sum * factor);
            }
        }
    }
}

/// Goes over the key blocks that a block of queries sees, adds their head's sink, and stores the output if it is wanted.
fn attend<T: Real>(
    inputs: &Inputs<T>,
    block: Block,
    sink: Option<f32>,
    out: Option<Shared<T>>,
    room: &mut ForwardScratch,
) {
    let (task, [qk_dim, v_dim]) = (block.task, block.task.shape.head_dims());
    let (first_query, queries) = block.queries;
    let at = task.q_offset(qk_dim, block.head, first_query);
    // Zeros where there are fewer queries than columns.
    room.q.fill(0.0);
    let (source, width) = (inputs.q[at..].as_ptr(), task.q_width(qk_dim));
    let (sizes, columns) = ((queries, qk_dim), room.largest.len());
    // SAFETY: the block's rows of q lie in the tensor.
    let q = unsafe { transpose(source, width, sizes, room.q, columns) };
    room.largest.fill(f32::NEG_INFINITY);
    room.total.fill(0.0);
    let (first_key, end) = (inputs.first_key(block), first_query + queries);
    for key in (first_key..end).step_by(KEYS) {
        let block = Block {
            keys: (key, KEYS.min(end - key)),
            ..block
        };
        weigh(inputs, block, q, room);
        if out.is_some() {
            drop_weights(inputs, block, room);
            add_values(inputs, block, key == first_key, room);
        }
    }
    if let Some(sink) = sink {
        room.join_sink(sink, out.map(|_| v_dim));
    }
    if let Some(out) = out {
        let out = out.at(task.q_offset(v_dim, block.head, first_query));
        // SAFETY: these rows and columns of the output belong to this task.
        unsafe { room.store_out(out, task.q_width(v_dim), queries, v_dim) };
    }
}

/// Computes the block's scores, replaces them by their weights, and updates the statistics.
fn weigh<T: Real>(inputs: &Inputs<T>, block: Block, q: Matrix, room: &mut ForwardScratch) {
    let (task, dim) = (block.task, block.task.shape.qk_head_dim);
    let ((key, keys), columns) = (block.keys, room.largest.len());
    let at = task.kv_offset(dim, key);
    // SAFETY: the block's rows of k lie in the tensor, and the scores have room for `keys` rows of queries.
    unsafe {
        let k = panel(
            inputs.k[at..].as_ptr(),
            task.kv_width(dim),
            (keys, dim),
            room.k_copy,
        );
        let scores = Output::rows(room.scores.as_mut_ptr(), columns);
        product((keys, columns, dim), scores, k, q, task.shape.scale());
    }
    if task.shape.cap.is_some() {
        cap_scores(&mut room.scores[..keys * columns], task.shape.cap);
    }
    hide(inputs, block, room);
    online_softmax(
        &mut room.scores[..keys * columns],
        columns,
        room.largest,
        room.total,
        room.rescale,
    );
}

/// Sets the scores of keys that a query does not see to negative infinity.
fn hide<T: Real>(inputs: &Inputs<T>, block: Block, room: &mut ForwardScratch) {
    let ((query, queries), (key, keys)) = (block.queries, block.keys);
    let first_keys = inputs.first_keys(block);
    let rows = room.scores.chunks_exact_mut(room.largest.len());
    for (key, scores) in (key..key + keys).zip(rows) {
        let earlier = key.saturating_sub(query).min(queries);
        scores[..earlier].fill(f32::NEG_INFINITY);
        if let Some(first_keys) = &first_keys {
            hide_earlier_keys(&mut scores[..queries], key as i32, first_keys);
        }
    }
}

/// Drops weights. The totals count them already, as dropout comes after the softmax.
fn drop_weights<T: Real>(inputs: &Inputs<T>, block: Block, room: &mut ForwardScratch) {
    let ((query, queries), (key, keys)) = (block.queries, block.keys);
    let rows = room.scores.chunks_exact_mut(room.largest.len());
    if let Some(mask) = inputs.mask {
        for (key, weights) in (key..key + keys).zip(rows) {
            let (first, step) = (inputs.element(block, query, key), inputs.shape.seq as u64);
            drop_elements(&mut weights[..queries], first, step, mask);
        }
    }
}

/// Adds the block's weighted values to the sums.
fn add_values<T: Real>(inputs: &Inputs<T>, block: Block, first: bool, room: &mut ForwardScratch) {
    let (task, dim) = (block.task, block.task.shape.v_head_dim);
    let (key, keys) = block.keys;
    if !first {
        rescale_rows(room.sums, room.rescale, dim);
    }
    let weights = Matrix::rows(room.scores.as_ptr(), room.largest.len());
    let at = task.kv_offset(dim, key);
    // SAFETY: the block's rows of v lie in the tensor, and the sums have room for its queries.
    unsafe {
        let v = panel(
            inputs.v[at..].as_ptr(),
            task.kv_width(dim),
            (keys, dim),
            room.v_copy,
        );
        let sums = Output::rows(room.sums.as_mut_ptr(), dim).accumulating(!first);
        product((block.queries.1, dim, keys), sums, weights.t(), v, 1.0);
    }
}

/// e^(score - largest), exactly 0 for a hidden score.
#[inline(always)]
fn weight(score: f32, largest: f32) -> f32 {
    if score == f32::NEG_INFINITY {
        0.0
    } else {
        exp(score - largest)
    }
}

/// `LANES` elements of a row, as an array so that loops over lanes have no bounds checks.
#[inline(always)]
fn lanes(row: &mut [f32], start: usize) -> &mut [f32; LANES] {
    let lanes = row[start..].first_chunk_mut();
    lanes.expect("rows are whole vectors")
}

vectorized! {
    /// Replaces scores `[keys, stride]` by e^(score - largest), and updates `largest` and `total`.
    fn online_softmax(
        scores: &mut [f32],
        stride: usize,
        largest: &mut [f32],
        total: &mut [f32],
        rescale: &mut [f32],
    ) {
        for start in (0..stride).step_by(LANES) {
            let before = *lanes(largest, start);
            let mut after = before;
            for row in scores.chunks_exact_mut(stride) {
                let scores = lanes(row, start);
                for lane in 0..LANES {
                    after[lane] = if scores[lane] > after[lane] { scores[lane] } else { after[lane] };
                }
            }
            let mut sums = [0.0; LANES];
            for row in scores.chunks_exact_mut(stride) {
                let scores = lanes(row, start);
                for lane in 0..LANES {
                    scores[lane] = weight(scores[lane], after[lane]);
                    sums[lane] += scores[lane];
                }
            }
            let (total, rescale) = (lanes(total, start), lanes(rescale, start));
            for lane in 0..LANES {
                rescale[lane] = weight(before[lane], after[lane]);
                total[lane] = total[lane] * rescale[lane] + sums[lane];
            }
            *lanes(largest, start) = after;
        }
    }

    fn cap_scores(scores: &mut [f32], cap: Option<Positive>) {
        scores.iter_mut().for_each(|score| *score = capped(*score, cap));
    }

    /// Scores of one key, by queries that see keys from their first on.
    fn hide_earlier_keys(scores: &mut [f32], key: i32, first_keys: &[i32]) {
        for (score, first) in scores.iter_mut().zip(first_keys) {
            *score = if key < *first { f32::NEG_INFINITY } else { *score };
        }
    }

    fn rescale_rows(sums: &mut [f32], rescale: &[f32], dim: usize) {
        for (sums, factor) in sums.chunks_exact_mut(dim).zip(rescale) {
            sums.iter_mut().for_each(|sum| *sum *= factor);
        }
    }
}
