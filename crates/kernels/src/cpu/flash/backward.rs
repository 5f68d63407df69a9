//! The backward pass: it recomputes probabilities from q, k and the statistics (Dao et al. 2022).
//!
//! A task computes one key-value head of one sequence. It goes over blocks of keys, for each over its query heads, and
//! for each of those over blocks of queries. Sums of dk and dv stay in one block of scratch. Sums of dq add their terms
//! in the order of the keys.

use super::{Block, Inputs, KEYS, QUERIES, block_sizes, drop_elements, for_each_item, transpose};
use crate::cpu::Shared;
use crate::cpu::attention::{Pieces, Task, capped, panel, slope};
use crate::cpu::dispatch::by_dtype;
use crate::cpu::gemm::{Matrix, Output, product};
use crate::cpu::simd::{Real, exp, lane_sum, vectorized};
use crate::cpu::sinks::sink_gradient;
use crate::operation::FlashAttentionBackward;
use crate::{AttentionShape, Positive};

pub(in crate::cpu) fn flash_attention_backward(op: FlashAttentionBackward) {
    by_dtype!(op.q.dtype(), flash_attention_backward_of(op));
}

fn flash_attention_backward_of<T: Real>(op: FlashAttentionBackward) {
    let [dq, dk, dv] = [op.dq, op.dk, op.dv].map(|out| Shared(out.pointer().cast::<T>()));
    let operands = Operands {
        inputs: Inputs::new([op.q, op.k, op.v], op.shape, op.options),
        dout: op.dout.slice::<T>(),
        out: op.out.slice::<T>(),
        lse: op.lse.slice(),
        dq,
    };
    let heads = op.shape.batch * op.shape.kv_heads;
    for_each_item(heads, op.scratch.slice_mut(), |item, scratch| {
        let task = operands.inputs.task(item);
        let mut room = BackwardScratch::new::<T>(op.shape, scratch);
        row_sums(&operands, task, &mut room);
        for key in (0..op.shape.seq).step_by(KEYS) {
            let keys = KEYS.min(op.shape.seq - key);
            key_block(&operands, task, (key, keys), &mut room);
            let [qk_dim, v_dim] = op.shape.head_dims();
            for (tensor, dim, sums) in [(dk, qk_dim, &*room.dk), (dv, v_dim, &*room.dv)] {
                let (at, width) = (task.kv_offset(dim, key), task.kv_width(dim));
                // SAFETY: these rows and columns of dk and dv belong to this task.
                unsafe { store(tensor.at(at), width, (keys, dim), sums) };
            }
        }
        if T::WIDEN {
            store_dq(&operands, task, &room);
        }
    });
    if let (Some(dsinks), Some(sinks)) = (op.dsinks, op.sinks) {
        let gradient = (dsinks, &op.dsinks_init);
        sink_gradient(gradient, [sinks, op.lse], op.shape, |row| {
            operands.row_sum(row)
        });
    }
}

/// The pass's inputs, and the gradient whose sums need no f32 scratch.
struct Operands<'a, T> {
    inputs: Inputs<'a, T>,
    dout: &'a [T],
    out: &'a [T],
    lse: &'a [f32],
    dq: Shared<T>,
}

impl<T: Real> Operands<'_, T> {
    /// The sum of `dout * out` over a row of `lse [b, heads, s]`.
    fn row_sum(&self, row: usize) -> f32 {
        let AttentionShape {
            seq,
            heads,
            v_head_dim,
            ..
        } = self.inputs.shape;
        let (head, token) = (row / seq % heads, row / seq / heads * seq + row % seq);
        let at = (token * heads + head) * v_head_dim;
        let mut sum = [0.0];
        row_dots::<T>(&mut sum, &self.dout[at..], &self.out[at..], 0, v_head_dim);
        sum[0]
    }
}

/// A task's scratch.
struct BackwardScratch<'a> {
    /// Probabilities, `[queries, keys]`.
    probs: &'a mut [f32],
    /// Gradients of the probabilities, later of the scores.
    dscores: &'a mut [f32],
    /// Sums of a block of keys, `[keys, d]` and `[keys, e]`.
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    /// Sums of `dout * out` of every query, `[group, seq]`.
    row_sums: &'a mut [f32],
    /// Sums of dq, `[group, seq, d]`, if the tensor's type cannot hold them.
    dq: &'a mut [f32],
    q_copy: &'a mut [f32],
    dout_copy: &'a mut [f32],
    k_copy: &'a mut [f32],
    /// Keys and values of a block transposed, `[d, keys]` and `[e, keys]`.
    k_transposed: &'a mut [f32],
    v_transposed: &'a mut [f32],
}

impl<'a> BackwardScratch<'a> {
    fn new<T: Real>(shape: AttentionShape, scratch: &'a mut [f32]) -> BackwardScratch<'a> {
        let (queries, keys) = block_sizes(shape);
        let ([qk_dim, v_dim], rows) = (shape.head_dims(), shape.group() * shape.seq);
        let mut pieces = Pieces(scratch);
        BackwardScratch {
            probs: pieces.take(keys * queries),
            dscores: pieces.take(keys * queries),
            dk: pieces.take(keys * qk_dim),
            dv: pieces.take(keys * v_dim),
            row_sums: pieces.take(rows),
            dq: pieces.take_if(T::WIDEN, rows * qk_dim),
            q_copy: pieces.take_if(T::WIDEN, queries * qk_dim),
            dout_copy: pieces.take_if(T::WIDEN, queries * v_dim),
            k_copy: pieces.take_if(T::WIDEN, keys * qk_dim),
            k_transposed: pieces.take(keys * qk_dim),
            v_transposed: pieces.take(keys * v_dim),
        }
    }
}

/// The sums of `dout * out` over each row. They equal the sums of the probabilities times their gradients, with or
/// without dropout.
fn row_sums<T: Real>(operands: &Operands<T>, task: Task, room: &mut BackwardScratch) {
    let (seq, dim) = (task.shape.seq, task.shape.v_head_dim);
    for (head, sums) in task.heads().zip(room.row_sums.chunks_exact_mut(seq)) {
        let at = task.q_offset(dim, head, 0);
        row_dots::<T>(
            sums,
            &operands.dout[at..],
            &operands.out[at..],
            task.q_width(dim),
            dim,
        );
    }
}

/// Adds the part of all queries that see a block of keys to its dk and dv, and the keys' part to the queries' dq.
fn key_block<T: Real>(
    operands: &Operands<T>,
    task: Task,
    keys: (usize, usize),
    room: &mut BackwardScratch,
) {
    let (seq, dims) = (task.shape.seq, task.shape.head_dims());
    let (first, end) = (keys.0, keys.0 + keys.1);
    let [k_at, v_at] = dims.map(|dim| task.kv_offset(dim, first));
    let [k_width, v_width] = dims.map(|dim| task.kv_width(dim));
    let [k_sizes, v_sizes] = dims.map(|dim| (keys.1, dim));
    let k = operands.inputs.k[k_at..].as_ptr();
    let v = operands.inputs.v[v_at..].as_ptr();
    // SAFETY: the block's rows of k and v lie in the tensors.
    let kv = unsafe {
        KeyBlock {
            first,
            k: panel(k, k_width, k_sizes, room.k_copy),
            k_transposed: transpose(k, k_width, k_sizes, room.k_transposed, keys.1),
            v_transposed: transpose(v, v_width, v_sizes, room.v_transposed, keys.1),
        }
    };
    room.dk.fill(0.0);
    room.dv.fill(0.0);
    // Earlier query blocks see none of these keys: the first that does is the block with the first key's own query.
    let first_queries = first / QUERIES * QUERIES;
    for head in task.heads() {
        // For later queries, the window begins after these keys.
        let end_queries = seq.min(end - 1 + task.shape.reach());
        for query in (first_queries..end_queries).step_by(QUERIES) {
            let queries = (query, QUERIES.min(seq - query));
            let block = Block {
                task,
                head,
                queries,
                keys,
            };
            let seen = operands.inputs.first_key(block).max(first);
            if seen < end {
                let keys = (seen, end.min(query + queries.1) - seen);
                block_pair(operands, Block { keys, ..block }, &kv, room);
            }
        }
    }
}

/// Keys and values of a block, as the products need them.
struct KeyBlock {
    first: usize,
    k: Matrix,
    k_transposed: Matrix,
    v_transposed: Matrix,
}

impl KeyBlock {
    /// The keys, and both transposed, from `key` on.
    fn from(&self, key: usize) -> [Matrix; 3] {
        let skipped = key - self.first;
        [
            self.k.starting_at_row(skipped),
            self.k_transposed.starting_at_column(skipped),
            self.v_transposed.starting_at_column(skipped),
        ]
    }
}

/// Computes one block of scores, and its part of dq, dk and dv.
fn block_pair<T: Real>(
    operands: &Operands<T>,
    block: Block,
    kv: &KeyBlock,
    room: &mut BackwardScratch,
) {
    let (task, dims) = (block.task, block.task.shape.head_dims());
    let ((query, queries), (key, keys)) = (block.queries, block.keys);
    let ([qk_dim, v_dim], scale) = (dims, task.shape.scale());
    let [k, k_transposed, v_transposed] = kv.from(key);
    let [q_at, out_at] = dims.map(|dim| task.q_offset(dim, block.head, query));
    let [q_width, out_width] = dims.map(|dim| task.q_width(dim));
    let (probs, dscores) = (room.probs.as_mut_ptr(), room.dscores.as_mut_ptr());
    // SAFETY: the block's rows lie in the tensors; scores and their gradients have room for it.
    let (q, dout) = unsafe {
        let (q, dout) = (&operands.inputs.q[q_at..], &operands.dout[out_at..]);
        let q = panel(q.as_ptr(), q_width, (queries, qk_dim), room.q_copy);
        let dout = panel(dout.as_ptr(), out_width, (queries, v_dim), room.dout_copy);
        let [probs, dscores] = [probs, dscores].map(|scores| Output::rows(scores, keys));
        product((queries, keys, qk_dim), probs, q, k_transposed, scale);
        product((queries, keys, v_dim), dscores, dout, v_transposed, 1.0);
        (q, dout)
    };
    differentiate(operands, block, room);
    let [probs, dscores] = [probs, dscores].map(|block| Matrix::rows(block, keys));
    let row = key - kv.first;
    let [dk, dv] = [(&mut *room.dk, qk_dim), (&mut *room.dv, v_dim)].map(|(sums, dim)| {
        let sums = sums[row * dim..].as_mut_ptr();
        Output::rows(sums, dim).accumulating(true)
    });
    // The first keys that any of the queries sees overwrite their dq; later ones add to it.
    let is_later = operands.inputs.first_key(block) != key;
    let dq = dq_rows(operands, block, room).accumulating(is_later);
    // SAFETY: the block's keys lie within the sums, and its rows and columns of dq belong to this task.
    unsafe {
        product((keys, v_dim, queries), dv, probs.t(), dout, 1.0);
        product((keys, qk_dim, queries), dk, dscores.t(), q, scale);
        product((queries, qk_dim, keys), dq, dscores, k, scale);
    }
}

/// Where the sums of dq for a block's queries are.
fn dq_rows<T: Real>(operands: &Operands<T>, block: Block, room: &mut BackwardScratch) -> Output {
    let (task, query) = (block.task, block.queries.0);
    let dim = task.shape.qk_head_dim;
    if T::WIDEN {
        let row = (block.head - task.heads().start) * task.shape.seq + query;
        Output::rows(room.dq[row * dim..].as_mut_ptr(), dim)
    } else {
        let at = task.q_offset(dim, block.head, query);
        Output::rows(operands.dq.at(at).cast(), task.q_width(dim))
    }
}

/// Turns scores into probabilities, and gradients of probabilities into gradients of the scores before scaling. Then
/// drops the probabilities that the forward pass dropped.
fn differentiate<T: Real>(operands: &Operands<T>, block: Block, room: &mut BackwardScratch) {
    let ((query, queries), (key, keys)) = (block.queries, block.keys);
    let inputs = &operands.inputs;
    let first_keys = inputs.first_keys(block);
    let lse = &operands.lse[block.statistics_offset()..];
    let group_head = block.head - block.task.heads().start;
    let dots = &room.row_sums[group_head * inputs.shape.seq + query..];
    let rows = room
        .probs
        .chunks_exact_mut(keys)
        .zip(room.dscores.chunks_exact_mut(keys));
    for (row, (probs, dprobs)) in rows.take(queries).enumerate() {
        let first = first_keys.map_or(0, |first_keys| first_keys[row] as usize);
        let end = (query + row + 1).saturating_sub(key).min(keys);
        let seen = first.saturating_sub(key).min(end)..end;
        for row in [&mut *probs, &mut *dprobs] {
            row[..seen.start].fill(0.0);
            row[seen.end..].fill(0.0);
        }
        let element = inputs.element(block, query + row, key + seen.start);
        let (probs, dprobs) = (&mut probs[seen.clone()], &mut dprobs[seen]);
        if let Some(mask) = inputs.mask {
            drop_elements(dprobs, element, 1, mask);
        }
        softmax_backward(probs, dprobs, lse[row], dots[row], inputs.shape.cap);
        if let Some(mask) = inputs.mask {
            drop_elements(probs, element, 1, mask);
        }
    }
}

/// Rounds a block's sums of dk or dv into the tensor.
///
/// # Safety
/// `tensor` must start `rows` live rows, `stride` apart, of `dim` columns that only the task touches.
unsafe fn store<T: Real>(tensor: *mut T, stride: usize, (rows, dim): (usize, usize), sums: &[f32]) {
    for (row, sums) in sums.chunks_exact(dim).take(rows).enumerate() {
        let row = tensor.wrapping_add(row * stride);
        // SAFETY: the caller's promise.
        narrow_row(unsafe { std::slice::from_raw_parts_mut(row, dim) }, sums);
    }
}

/// Rounds the sums of dq into the tensor.
fn store_dq<T: Real>(operands: &Operands<T>, task: Task, room: &BackwardScratch) {
    let (seq, dim) = (task.shape.seq, task.shape.qk_head_dim);
    for (head, sums) in task.heads().zip(room.dq.chunks_exact(seq * dim)) {
        for (query, sums) in sums.chunks_exact(dim).enumerate() {
            let row = operands.dq.at(task.q_offset(dim, head, query));
            // SAFETY: this row and these columns of dq belong to this task.
            narrow_row(unsafe { std::slice::from_raw_parts_mut(row, dim) }, sums);
        }
    }
}

vectorized! {
    fn narrow_row<T: Real>(out: &mut [T], sums: &[f32]) {
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = T::narrow(*sum);
        }
    }

    /// Dot products of the first `dim` elements of rows that lie `stride` apart.
    fn row_dots<T: Real>(dots: &mut [f32], a: &[T], b: &[T], stride: usize, dim: usize) {
        for (row, dot) in dots.iter_mut().enumerate() {
            let row = row * stride..row * stride + dim;
            *dot = lane_sum([&a[row.clone()], &b[row]], |[a, b]| a * b);
        }
    }

    /// `probs` holds scores of a query and becomes p = e^(score - lse), of a score within its cap; `dprobs` becomes p (dp - dot), times
    /// the slope of the cap.
    fn softmax_backward(
        probs: &mut [f32],
        dprobs: &mut [f32],
        lse: f32,
        dot: f32,
        cap: Option<Positive>,
    ) {
        let Some(_) = cap else {
            for (p, dp) in probs.iter_mut().zip(dprobs) {
                *p = exp(*p - lse);
                *dp = *p * (*dp - dot);
            }
            return;
        };
        for (p, dp) in probs.iter_mut().zip(dprobs) {
            let score = capped(*p, cap);
            *p = exp(score - lse);
            *dp = *p * (*dp - dot) * slope(score, cap);
        }
    }
}
