//! Causal attention with stored probabilities.
//!
//! A task computes one key-value head of one sequence. It goes over its query heads in order, and over their rows in
//! blocks. So sums into dk and dv have a fixed order, and no two tasks write the same element. For a block of rows,
//! only keys that some query of the block sees are computed.
//!
//! Stored probabilities have no dropout applied. The forward pass drops elements of a copy, one tile at a time on the
//! stack. The backward pass drops elements of a copy in the place of the probabilities' gradients.

use super::dispatch::by_dtype;
use super::dropout::{Mask, drop_elements};
use super::gemm::{Matrix, Output, product};
use super::simd::{Real, exp, lane_max, lane_sum, tanh, vectorized};
use super::sinks::sink_gradient;
use super::{Shared, part};
use crate::operation::{Attention, AttentionBackward};
use crate::{AttentionShape, Positive};
use memory::DType;
use rayon::prelude::*;
use std::ops::Range;

/// Query rows of a block.
const ROW_BLOCK: usize = 64;

/// Keys of a tile of dropped probabilities.
const TILE_KEYS: usize = 64;

/// A block of scores; panels with as many rows, like q and like out; panels of all rows, like k and like v.
fn scratch_blocks(shape: AttentionShape) -> (usize, [usize; 2], [usize; 2]) {
    let rows = ROW_BLOCK.min(shape.seq);
    let panels = |rows| shape.head_dims().map(|dim| rows * dim);
    (rows * shape.seq, panels(rows), panels(shape.seq))
}

/// Scratch of one task of the forward pass.
pub(crate) fn forward_scratch(shape: AttentionShape, dtype: DType, probs_kept: bool) -> usize {
    let (scores, [q, out], [k, v]) = scratch_blocks(shape);
    match dtype {
        DType::F32 if probs_kept => 0,
        DType::F32 => scores,
        // bf16 is widened: q and out by rows, k and v whole.
        _ => scores + q + out + k + v,
    }
}

/// Scratch of one task of the backward pass.
pub(crate) fn backward_scratch(shape: AttentionShape, dtype: DType) -> usize {
    let (scores, [q, out], [k, v]) = scratch_blocks(shape);
    let of_cap = if shape.cap.is_some() { scores } else { 0 };
    of_cap
        + match dtype {
            DType::F32 => scores,
            // Probabilities and scores, q, dout and dq by rows, k, v, dk and dv whole.
            _ => 2 * scores + 2 * q + out + 2 * k + 2 * v,
        }
}

/// A score within its cap.
#[inline(always)]
pub(super) fn capped(score: f32, cap: Option<Positive>) -> f32 {
    match cap.map(Positive::get) {
        Some(cap) => cap * tanh(score / cap),
        None => score,
    }
}

/// What the gradient of a capped score is multiplied by to become that of the score.
#[inline(always)]
pub(super) fn slope(capped: f32, cap: Option<Positive>) -> f32 {
    let share = cap.map_or(0.0, |cap| capped / cap.get());
    1.0 - share * share
}

/// A task's sequence, its key-value head, and the widths.
#[derive(Clone, Copy)]
pub(super) struct Task {
    pub(super) shape: AttentionShape,
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
}

impl Task {
    /// Elements of a token in a tensor of query heads, each `dim` wide.
    pub(super) fn q_width(&self, dim: usize) -> usize {
        self.shape.heads * dim
    }

    /// Elements of a token in a tensor of key-value heads, each `dim` wide.
    pub(super) fn kv_width(&self, dim: usize) -> usize {
        self.shape.kv_heads * dim
    }

    /// Offset of the first element of `head` at `row` in a tensor of query heads, each `dim` wide.
    pub(super) fn q_offset(&self, dim: usize, head: usize, row: usize) -> usize {
        (self.sequence * self.shape.seq + row) * self.q_width(dim) + head * dim
    }

    /// Offset of the task's first element at `row` in a tensor of key-value heads, each `dim` wide.
    pub(super) fn kv_offset(&self, dim: usize, row: usize) -> usize {
        (self.sequence * self.shape.seq + row) * self.kv_width(dim) + self.kv_head * dim
    }

    /// Where the number of `head`'s query `row` is in a tensor `[b, heads, s]`.
    pub(super) fn statistics_offset(&self, head: usize, row: usize) -> usize {
        (self.sequence * self.shape.heads + head) * self.shape.seq + row
    }

    pub(super) fn heads(&self) -> std::ops::Range<usize> {
        let group = self.shape.group();
        self.kv_head * group..(self.kv_head + 1) * group
    }

    /// Blocks of query rows of each head, in order.
    fn row_blocks(self) -> impl Iterator<Item = RowBlock> {
        let rows = move |head, row| RowBlock {
            task: self,
            head,
            row,
            rows: ROW_BLOCK.min(self.shape.seq - row),
        };
        let first_rows = move || (0..self.shape.seq).step_by(ROW_BLOCK);
        self.heads()
            .flat_map(move |head| first_rows().map(move |row| rows(head, row)))
    }
}

/// Some query rows of a head.
#[derive(Clone, Copy)]
struct RowBlock {
    task: Task,
    head: usize,
    row: usize,
    rows: usize,
}

impl RowBlock {
    /// The keys that at least one of its queries sees.
    fn visible(&self) -> Range<usize> {
        self.task.shape.first_in_window(self.row)..self.row + self.rows
    }

    /// Offset of its first element in a tensor of query heads, each `dim` wide.
    fn q_offset(&self, dim: usize) -> usize {
        self.task.q_offset(dim, self.head, self.row)
    }

    /// Offset of its first number in a tensor `[b, heads, s]`.
    fn statistics_offset(&self) -> usize {
        self.task.statistics_offset(self.head, self.row)
    }

    /// Offset of its first element among the probabilities.
    fn probs_offset(&self) -> usize {
        self.statistics_offset() * self.task.shape.seq
    }
}

/// Runs one task per key-value head of every sequence, each with its own part of the scratch.
fn for_each_task(
    shape: AttentionShape,
    scratch: &mut [f32],
    run: impl Fn(Task, &mut [f32]) + Sync,
) {
    let tasks = shape.batch * shape.kv_heads;
    let each = scratch.len() / tasks.max(1);
    let scratch = Shared(scratch.as_mut_ptr());
    (0..tasks).into_par_iter().for_each(|index| {
        let task = Task {
            shape,
            sequence: index / shape.kv_heads,
            kv_head: index % shape.kv_heads,
        };
        // SAFETY: task `index` alone has this part of the scratch.
        run(task, unsafe { part(scratch, index * each, each) });
    });
}

/// Scratch from which parts are taken one after the other.
pub(super) struct Pieces<'a>(pub(super) &'a mut [f32]);

impl<'a> Pieces<'a> {
    pub(super) fn take(&mut self, elements: usize) -> &'a mut [f32] {
        let (piece, rest) = std::mem::take(&mut self.0).split_at_mut(elements);
        self.0 = rest;
        piece
    }

    /// A part that only widened types need; empty for others.
    pub(super) fn take_if(&mut self, needed: bool, elements: usize) -> &'a mut [f32] {
        self.take(if needed { elements } else { 0 })
    }
}

/// `rows` rows of `columns` at `source`, as f32: the tensor itself, or a widened copy.
///
/// # Safety
/// The rows must lie in a live tensor that nobody writes.
pub(super) unsafe fn panel<T: Real>(
    source: *const T,
    stride: usize,
    (rows, columns): (usize, usize),
    copy: &mut [f32],
) -> Matrix {
    if !T::WIDEN {
        return Matrix::rows(source.cast(), stride);
    }
    for (row, copy) in copy[..rows * columns].chunks_exact_mut(columns).enumerate() {
        // SAFETY: the caller's promise.
        let source =
            unsafe { std::slice::from_raw_parts(source.wrapping_add(row * stride), columns) };
        copy.iter_mut()
            .zip(source)
            .for_each(|(copy, value)| *copy = value.widen());
    }
    Matrix::rows(copy.as_ptr(), columns)
}

/// Where `rows` rows of f32 results go: the tensor itself, or a copy that [`narrow`] later rounds into it.
fn target<T: Real>(tensor: *mut T, stride: usize, columns: usize, copy: &mut [f32]) -> Output {
    if T::WIDEN {
        Output::rows(copy.as_mut_ptr(), columns)
    } else {
        Output::rows(tensor.cast(), stride)
    }
}

/// Rounds the copy into its tensor.
///
/// # Safety
/// The rows must lie in a live tensor that only this task touches.
unsafe fn narrow<T: Real>(
    tensor: *mut T,
    stride: usize,
    (rows, columns): (usize, usize),
    copy: &[f32],
) {
    if T::WIDEN {
        for (row, copy) in copy[..rows * columns].chunks_exact(columns).enumerate() {
            // SAFETY: the caller's promise.
            let tensor = unsafe {
                std::slice::from_raw_parts_mut(tensor.wrapping_add(row * stride), columns)
            };
            tensor
                .iter_mut()
                .zip(copy)
                .for_each(|(value, copy)| *value = T::narrow(*copy));
        }
    }
}

pub(super) fn attention(op: Attention) {
    by_dtype!(op.q.dtype(), attention_of(op));
}

fn attention_of<T: Real>(op: Attention) {
    let forward = Forward {
        mask: Mask::of(op.dropout),
        out: op.out.map(|out| Shared(out.pointer().cast::<T>())),
        probs: op.probs.map(|probs| Shared(probs.pointer().cast::<T>())),
        lse: op.lse.map(|lse| Shared(lse.pointer().cast())),
        q: op.q.slice(),
        k: op.k.slice(),
        v: op.v.slice(),
        sinks: op.sinks.map(|sinks| sinks.slice()),
    };
    for_each_task(op.shape, op.scratch.slice_mut(), |task, scratch| {
        forward.run(task, scratch)
    });
}

/// The operands of a forward pass, which tasks share.
struct Forward<'a, T> {
    mask: Option<Mask>,
    out: Option<Shared<T>>,
    probs: Option<Shared<T>>,
    lse: Option<Shared<f32>>,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    sinks: Option<&'a [T]>,
}

impl<T: Real> Forward<'_, T> {
    fn run(&self, task: Task, scratch: &mut [f32]) {
        let (seq, dims) = (task.shape.seq, task.shape.head_dims());
        let block_rows = ROW_BLOCK.min(seq);
        let is_stored = self.probs.is_some();
        debug_assert!(scratch.len() >= forward_scratch(task.shape, T::DTYPE, is_stored));
        let mut pieces = Pieces(scratch);
        let scores = pieces.take_if(T::WIDEN || !is_stored, block_rows * seq);
        let [q_copy, out_copy] = dims.map(|dim| pieces.take_if(T::WIDEN, block_rows * dim));
        let kv_copies = dims.map(|dim| pieces.take_if(T::WIDEN, seq * dim));
        let [keys, values] = keys_and_values(task, [self.k, self.v], kv_copies);
        for block in task.row_blocks() {
            let dim = task.shape.qk_head_dim;
            let (q, sizes) = (&self.q[block.q_offset(dim)..], (block.rows, dim));
            // SAFETY: the block's queries lie in the tensor.
            let queries = unsafe { panel(q.as_ptr(), task.q_width(dim), sizes, q_copy) };
            let p = self.probabilities(block, queries, keys, scores);
            if let Some(out) = self.out {
                self.weigh_values(block, p, values, out, out_copy);
            }
        }
    }

    /// A block's probabilities, in whole rows, as they are stored: in their tensor if that holds f32, else in `scores`.
    fn probabilities<'a>(
        &self,
        block: RowBlock,
        queries: Matrix,
        keys: Matrix,
        scores: &'a mut [f32],
    ) -> &'a [f32] {
        let (shape, rows, visible) = (block.task.shape, block.rows, block.visible());
        let stored = self.probs.map(|probs| probs.at(block.probs_offset()));
        let p = match stored {
            Some(stored) if !T::WIDEN => stored.cast::<f32>(),
            _ => scores.as_mut_ptr(),
        };
        let sizes = (rows, visible.len(), shape.qk_head_dim);
        let out = Output::rows(p.wrapping_add(visible.start), shape.seq);
        let sink = self.sinks.map(|sinks| sinks[block.head].widen());
        let lse = self.lse.map(|lse| lse.at(block.statistics_offset()));
        // SAFETY: `p` has `rows` rows of `seq`, in the scratch or in this task's part of the probabilities, and the block has as many
        // statistics.
        unsafe {
            let keys = keys.starting_at_row(visible.start);
            product(sizes, out, queries, keys.t(), shape.scale());
            let p = std::slice::from_raw_parts_mut(p, rows * shape.seq);
            let lse = lse.map(|lse| std::slice::from_raw_parts_mut(lse, rows));
            softmax_rows(p, shape, block.row, sink, lse.unwrap_or_default());
            if T::WIDEN {
                round_rows::<T>(p);
                if let Some(stored) = stored {
                    narrow(stored, shape.seq, (rows, shape.seq), p);
                }
            }
            p
        }
    }

    /// A block's rows of the output: values, weighed by those of the probabilities `p` that are not dropped.
    fn weigh_values(
        &self,
        block: RowBlock,
        p: &[f32],
        values: Matrix,
        out: Shared<T>,
        copy: &mut [f32],
    ) {
        let (task, dim) = (block.task, block.task.shape.v_head_dim);
        let (visible, tensor) = (block.visible(), out.at(block.q_offset(dim)));
        let out = target(tensor, task.q_width(dim), dim, copy);
        // SAFETY: these rows and columns of the output belong to this task; `p` has as many rows.
        unsafe {
            match self.mask {
                None => {
                    let sizes = (block.rows, dim, visible.len());
                    let p = Matrix::rows(p[visible.start..].as_ptr(), task.shape.seq);
                    product(sizes, out, p, values.starting_at_row(visible.start), 1.0)
                }
                Some(mask) => {
                    let first = block.probs_offset() as u64;
                    let sizes = (block.rows, dim, visible);
                    dropped_product(sizes, out, (p, first), values, mask)
                }
            }
            narrow(tensor, task.q_width(dim), (block.rows, dim), copy);
        }
    }
}

/// A task's rows of k and v, as f32.
fn keys_and_values<T: Real>(
    task: Task,
    [k, v]: [&[T]; 2],
    [k_copy, v_copy]: [&mut [f32]; 2],
) -> [Matrix; 2] {
    let whole = |tensor: &[T], dim, copy: &mut [f32]| {
        let (start, sizes) = (
            tensor[task.kv_offset(dim, 0)..].as_ptr(),
            (task.shape.seq, dim),
        );
        // SAFETY: the task's rows lie in the tensor.
        unsafe { panel(start, task.kv_width(dim), sizes, copy) }
    };
    let [qk_dim, v_dim] = task.shape.head_dims();
    [whole(k, qk_dim, k_copy), whole(v, v_dim, v_copy)]
}

/// A task's rows of dk or dv, or of their copy, as sums of nothing yet.
fn zeros<T: Real>(task: Task, tensor: Shared<T>, dim: usize, copy: &mut [f32]) -> Output {
    let start = tensor.at(task.kv_offset(dim, 0));
    let sums = target(start, task.kv_width(dim), dim, copy);
    for row in 0..task.shape.seq {
        let start = sums.pointer.wrapping_add(row * sums.row_stride);
        // SAFETY: these rows and columns belong to this task.
        unsafe { std::slice::from_raw_parts_mut(start, dim) }.fill(0.0);
    }
    sums.accumulating(true)
}

/// `out = p values` with `p` dropped, whose first element has the index `first`; its rows are whole.
///
/// # Safety
/// As for [`product`].
unsafe fn dropped_product(
    (rows, dim, visible): (usize, usize, Range<usize>),
    out: Output,
    (p, first): (&[f32], u64),
    values: Matrix,
    mask: Mask,
) {
    let seq = p.len() / rows;
    let mut tile = [0.0; ROW_BLOCK * TILE_KEYS];
    for key in visible.clone().step_by(TILE_KEYS) {
        let keys = TILE_KEYS.min(visible.end - key);
        for (row, tile) in tile.chunks_exact_mut(keys).take(rows).enumerate() {
            let at = row * seq + key;
            tile.copy_from_slice(&p[at..at + keys]);
            drop_elements(tile, first + at as u64, 1, mask);
        }
        let tile = Matrix::rows(tile.as_ptr(), keys);
        let (sizes, out) = ((rows, dim, keys), out.accumulating(key > visible.start));
        // SAFETY: the caller's promise; the tile has room for its rows.
        unsafe { product(sizes, out, tile, values.starting_at_row(key), 1.0) };
    }
}

/// Rounds to the stored type's precision, so that what is multiplied is what is stored.
fn round_rows<T: Real>(p: &mut [f32]) {
    p.iter_mut()
        .for_each(|value| *value = T::narrow(*value).widen());
}

vectorized! {
    /// Softmax of each row over the keys that its query sees, and over a sink; zero elsewhere. The first row is query `first`. The
    /// logarithm of each row's sum goes to `lse`, which is empty if nobody asks.
    fn softmax_rows(
        scores: &mut [f32],
        shape: AttentionShape,
        first: usize,
        sink: Option<f32>,
        lse: &mut [f32],
    ) {
        for (query, scores) in (first..).zip(scores.chunks_exact_mut(shape.seq)) {
            let (scores, hidden) = scores.split_at_mut(query + 1);
            let (earlier, scores) = scores.split_at_mut(shape.first_in_window(query));
            earlier.fill(0.0);
            if shape.cap.is_some() {
                scores.iter_mut().for_each(|score| *score = capped(*score, shape.cap));
            }
            let largest = sink.unwrap_or(f32::NEG_INFINITY).max(lane_max(scores));
            scores.iter_mut().for_each(|score| *score = exp(*score - largest));
            let of_sink = sink.map_or(0.0, |sink| exp(sink - largest));
            let sum = lane_sum([&*scores], |[score]| score) + of_sink;
            let factor = 1.0 / sum;
            scores.iter_mut().for_each(|score| *score *= factor);
            hidden.fill(0.0);
            if let Some(lse) = lse.get_mut(query - first) {
                *lse = largest + sum.ln();
            }
        }
    }

    /// `dp` becomes the gradient of the scores before scaling: p (dp - sum(p dp)), row by row. The sums go to `row_sums`, which is empty
    /// if nobody asks.
    fn softmax_backward_rows(
        dp: &mut [f32],
        p: &[f32],
        seq: usize,
        visible: Range<usize>,
        row_sums: &mut [f32],
    ) {
        for (row, (dp, p)) in dp.chunks_exact_mut(seq).zip(p.chunks_exact(seq)).enumerate() {
            let (dp, p) = (&mut dp[visible.clone()], &p[visible.clone()]);
            let dot = lane_sum([p, &*dp], |[p, dp]| p * dp);
            dp.iter_mut().zip(p).for_each(|(dp, p)| *dp = p * (*dp - dot));
            if let Some(sum) = row_sums.get_mut(row) {
                *sum = dot;
            }
        }
    }

    /// Gradients of capped scores become those of scores, row by row.
    fn apply_slopes(dp: &mut [f32], scores: &[f32], shape: AttentionShape, visible: Range<usize>) {
        for (dp, scores) in dp.chunks_exact_mut(shape.seq).zip(scores.chunks_exact(shape.seq)) {
            for (dp, score) in dp[visible.clone()].iter_mut().zip(&scores[visible.clone()]) {
                *dp *= slope(capped(*score, shape.cap), shape.cap);
            }
        }
    }
}

pub(super) fn attention_backward(op: AttentionBackward) {
    by_dtype!(op.q.dtype(), attention_backward_of(op));
}

fn attention_backward_of<T: Real>(op: AttentionBackward) {
    let [dq, dk, dv] = [op.dq, op.dk, op.dv].map(|out| Shared(out.pointer().cast::<T>()));
    let rows = match op.dsinks {
        Some(_) => op.shape.statistics().iter().product(),
        None => 0,
    };
    let (row_sums, scratch) = op.scratch.slice_mut::<f32>().split_at_mut(rows);
    let backward = Backward {
        mask: Mask::of(op.dropout),
        dq,
        dk,
        dv,
        row_sums: op.dsinks.as_ref().map(|_| Shared(row_sums.as_mut_ptr())),
        dout: op.dout.slice(),
        probs: op.probs.slice(),
        q: op.q.slice(),
        k: op.k.slice(),
        v: op.v.slice(),
    };
    for_each_task(op.shape, scratch, |task, scratch| {
        backward.run(task, scratch)
    });
    if let (Some(dsinks), Some(sinks), Some(lse)) = (op.dsinks, op.sinks, op.lse) {
        let gradient = (dsinks, &op.dsinks_init);
        sink_gradient(gradient, [sinks, lse], op.shape, |row| row_sums[row]);
    }
}

/// The operands of a backward pass, which tasks share.
struct Backward<'a, T> {
    mask: Option<Mask>,
    dq: Shared<T>,
    dk: Shared<T>,
    dv: Shared<T>,
    /// The sums of `dout * out` of every query, `[b, heads, s]`, if the sinks' gradient follows.
    row_sums: Option<Shared<f32>>,
    dout: &'a [T],
    probs: &'a [T],
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
}

/// A task's scratch for a block of rows: what is widened, the gradients of the probabilities, and scores where they have a cap.
struct RowRoom<'a> {
    dp: &'a mut [f32],
    scores: &'a mut [f32],
    p_copy: &'a mut [f32],
    q_copy: &'a mut [f32],
    dout_copy: &'a mut [f32],
    dq_copy: &'a mut [f32],
}

impl<T: Real> Backward<'_, T> {
    fn run(&self, task: Task, scratch: &mut [f32]) {
        let (seq, [qk_dim, v_dim]) = (task.shape.seq, task.shape.head_dims());
        let block_rows = ROW_BLOCK.min(seq);
        let mut pieces = Pieces(scratch);
        let dp = pieces.take(block_rows * seq);
        let scores = pieces.take_if(task.shape.cap.is_some(), block_rows * seq);
        let p_copy = pieces.take_if(T::WIDEN, block_rows * seq);
        let [q_copy, dout_copy, dq_copy] =
            [qk_dim, v_dim, qk_dim].map(|dim| pieces.take_if(T::WIDEN, block_rows * dim));
        let [k_copy, v_copy, dk_copy, dv_copy] =
            [qk_dim, v_dim, qk_dim, v_dim].map(|dim| pieces.take_if(T::WIDEN, seq * dim));
        let kv = keys_and_values(task, [self.k, self.v], [k_copy, v_copy]);
        let sums = [
            zeros(task, self.dk, qk_dim, dk_copy),
            zeros(task, self.dv, v_dim, dv_copy),
        ];
        let mut room = RowRoom {
            dp,
            scores,
            p_copy,
            q_copy,
            dout_copy,
            dq_copy,
        };
        for block in task.row_blocks() {
            self.run_block(block, kv, sums, &mut room);
        }
        for (sums, dim, copy) in [(self.dk, qk_dim, dk_copy), (self.dv, v_dim, dv_copy)] {
            let tensor = sums.at(task.kv_offset(dim, 0));
            // SAFETY: these rows and columns belong to this task.
            unsafe { narrow(tensor, task.kv_width(dim), (seq, dim), copy) };
        }
    }

    /// A block's rows of dq, and its part of the sums of dk and dv.
    fn run_block(
        &self,
        block: RowBlock,
        [keys, values]: [Matrix; 2],
        [dk, dv]: [Output; 2],
        room: &mut RowRoom,
    ) {
        let (task, rows, visible) = (block.task, block.rows, block.visible());
        let (seq, [qk_dim, v_dim]) = (task.shape.seq, task.shape.head_dims());
        let [q_at, out_at] = [qk_dim, v_dim].map(|dim| block.q_offset(dim));
        let [q_width, out_width] = [qk_dim, v_dim].map(|dim| task.q_width(dim));
        let (probs_at, first, keys_seen) = (block.probs_offset(), visible.start, visible.len());
        let [keys, values] = [keys, values].map(|panel| panel.starting_at_row(first));
        let [dk, dv] = [dk, dv].map(|sums| sums.starting_at_row(first));
        let scale = task.shape.scale();
        let row_sums = self.row_sums.map(|sums| sums.at(block.statistics_offset()));
        // SAFETY: every panel lies in its tensor or has room in its copy; dq's rows and columns of this head,
        // and the sums, belong to this task.
        unsafe {
            let (q, dout) = (self.q[q_at..].as_ptr(), self.dout[out_at..].as_ptr());
            let queries = panel(q, q_width, (rows, qk_dim), room.q_copy);
            let douts = panel(dout, out_width, (rows, v_dim), room.dout_copy);
            let p = &self.probs[probs_at..];
            let p = panel(p.as_ptr(), seq, (rows, seq), room.p_copy);
            let stored = std::slice::from_raw_parts(p.pointer, rows * seq);
            let dp = &mut room.dp[..rows * seq];
            let weights = match self.mask {
                None => p,
                Some(mask) => {
                    dp.copy_from_slice(stored);
                    drop_elements(dp, probs_at as u64, 1, mask);
                    Matrix::rows(dp.as_ptr(), seq)
                }
            };
            let weights = weights.starting_at_column(first).t();
            product((keys_seen, v_dim, rows), dv, weights, douts, 1.0);
            let dp_rows = Output::rows(dp[first..].as_mut_ptr(), seq);
            product((rows, keys_seen, v_dim), dp_rows, douts, values.t(), 1.0);
            if let Some(mask) = self.mask {
                drop_elements(dp, probs_at as u64, 1, mask);
            }
            let row_sums = row_sums.map(|sums| std::slice::from_raw_parts_mut(sums, rows));
            softmax_backward_rows(
                dp,
                stored,
                seq,
                visible.clone(),
                row_sums.unwrap_or_default(),
            );
            if task.shape.cap.is_some() {
                let scores = &mut room.scores[..rows * seq];
                let out = Output::rows(scores[first..].as_mut_ptr(), seq);
                product((rows, keys_seen, qk_dim), out, queries, keys.t(), scale);
                apply_slopes(dp, scores, task.shape, visible);
            }
            let ds = Matrix::rows(dp[first..].as_ptr(), seq);
            let dq = target(self.dq.at(q_at), q_width, qk_dim, room.dq_copy);
            product((rows, qk_dim, keys_seen), dq, ds, keys, scale);
            narrow(self.dq.at(q_at), q_width, (rows, qk_dim), room.dq_copy);
            product((keys_seen, qk_dim, rows), dk, ds.t(), queries, scale);
        }
    }
}
