//! Causal attention with stored probabilities.
//!
//! One task is one key-value head of one sequence: it walks its query heads in order and their rows in blocks, so
//! sums into dk and dv have a fixed order and no two tasks write the same element. The part of a row beyond the
//! diagonal is never computed.
//!
//! Stored probabilities are not dropped. The forward pass drops a copy, a tile at a time on the stack; the backward pass
//! drops one where the gradients of the probabilities will be.

use super::Shared;
use super::dispatch::by_dtype;
use super::dropout::{Mask, drop_elements};
use super::gemm::{Matrix, product};
use super::simd::{Real, exp, lane_max, lane_sum, vectorized};
use crate::AttentionShape;
use crate::operation::attention::{CPU_ROW_BLOCK, cpu_forward_scratch};
use crate::operation::{Attention, AttentionBackward};
use gemm::Parallelism;
use rayon::prelude::*;

/// Keys of a tile of dropped probabilities.
const TILE_KEYS: usize = 64;

/// Where a task is: its sequence, its key-value head, and widths.
#[derive(Clone, Copy)]
pub(super) struct Task {
    pub(super) shape: AttentionShape,
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
}

impl Task {
    pub(super) fn q_width(&self) -> usize {
        self.shape.heads * self.shape.head_dim
    }

    pub(super) fn kv_width(&self) -> usize {
        self.shape.kv_heads * self.shape.head_dim
    }

    /// Offset of the first element of `head` at `row` in a tensor shaped like q.
    pub(super) fn q_offset(&self, head: usize, row: usize) -> usize {
        (self.sequence * self.shape.seq + row) * self.q_width() + head * self.shape.head_dim
    }

    /// Offset of the task's first element in a tensor shaped like k.
    pub(super) fn kv_offset(&self) -> usize {
        self.sequence * self.shape.seq * self.kv_width() + self.kv_head * self.shape.head_dim
    }

    fn probs_offset(&self, head: usize, row: usize) -> usize {
        ((self.sequence * self.shape.heads + head) * self.shape.seq + row) * self.shape.seq
    }

    pub(super) fn heads(&self) -> std::ops::Range<usize> {
        let group = self.shape.group();
        self.kv_head * group..(self.kv_head + 1) * group
    }

    /// Blocks of query rows: first row and number.
    fn row_blocks(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let seq = self.shape.seq;
        (0..seq)
            .step_by(CPU_ROW_BLOCK)
            .map(move |row| (row, CPU_ROW_BLOCK.min(seq - row)))
    }
}

/// Runs one task for every key-value head of every sequence, each with its part of the scratch.
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
        run(task, unsafe {
            std::slice::from_raw_parts_mut(scratch.at(index * each), each)
        });
    });
}

/// Scratch handed out piece by piece.
pub(super) struct Pieces<'a>(pub(super) &'a mut [f32]);

impl<'a> Pieces<'a> {
    pub(super) fn take(&mut self, elements: usize) -> &'a mut [f32] {
        let (piece, rest) = std::mem::take(&mut self.0).split_at_mut(elements);
        self.0 = rest;
        piece
    }

    /// A piece that only widened types need.
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

/// Where f32 results of `rows` rows go: the tensor itself, or a copy that [`narrow`] rounds into it.
fn target<T: Real>(
    tensor: *mut T,
    stride: usize,
    columns: usize,
    copy: &mut [f32],
) -> (*mut f32, usize) {
    if T::WIDEN {
        (copy.as_mut_ptr(), columns)
    } else {
        (tensor.cast(), stride)
    }
}

/// Rounds a copy into the tensor it stands for.
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

pub(super) fn attention(operation: Attention) {
    by_dtype!(operation.q.dtype(), attention_of(operation));
}

fn attention_of<T: Real>(operation: Attention) {
    let Attention {
        out,
        probs,
        scratch,
        q,
        k,
        v,
        shape,
        dropout,
    } = operation;
    let mask = Mask::of(dropout);
    let out = out.map(|out| Shared(out.pointer().cast::<T>()));
    let probs = probs.map(|probs| Shared(probs.pointer().cast::<T>()));
    let inputs = (q.slice::<T>(), k.slice::<T>(), v.slice::<T>());
    for_each_task(shape, scratch.slice_mut(), |task, scratch| {
        forward_task(task, mask, out, probs, scratch, inputs)
    });
}

fn forward_task<T: Real>(
    task: Task,
    mask: Option<Mask>,
    out: Option<Shared<T>>,
    probs: Option<Shared<T>>,
    scratch: &mut [f32],
    (q, k, v): (&[T], &[T], &[T]),
) {
    let (seq, dim) = (task.shape.seq, task.shape.head_dim);
    let (q_width, kv_width) = (task.q_width(), task.kv_width());
    let block = CPU_ROW_BLOCK.min(seq);
    debug_assert!(scratch.len() >= cpu_forward_scratch(task.shape, T::DTYPE, probs.is_some()));
    let mut pieces = Pieces(scratch);
    let scores = pieces.take_if(T::WIDEN || probs.is_none(), block * seq);
    let [q_copy, out_copy] = [(); 2].map(|()| pieces.take_if(T::WIDEN, block * dim));
    let [k_copy, v_copy] = [(); 2].map(|()| pieces.take_if(T::WIDEN, seq * dim));
    let at = task.kv_offset();
    // SAFETY: the task's rows of k and v lie in the tensors.
    let keys = unsafe { panel(k[at..].as_ptr(), kv_width, (seq, dim), k_copy) };
    // SAFETY: as above.
    let values = unsafe { panel(v[at..].as_ptr(), kv_width, (seq, dim), v_copy) };
    for head in task.heads() {
        for (row, rows) in task.row_blocks() {
            let visible = row + rows;
            let at = task.q_offset(head, row);
            // SAFETY: as above.
            let queries = unsafe { panel(q[at..].as_ptr(), q_width, (rows, dim), q_copy) };
            let stored = probs.map(|probs| probs.at(task.probs_offset(head, row)));
            let (p, stride) = match stored {
                Some(stored) if !T::WIDEN => (stored.cast::<f32>(), seq),
                _ => (scores.as_mut_ptr(), seq),
            };
            let scale = task.shape.scale();
            // SAFETY: `p` has `rows` rows of `seq`, in the scratch or in this task's part of the probabilities.
            unsafe {
                product(
                    (rows, visible, dim),
                    p,
                    stride,
                    false,
                    queries,
                    keys.t(),
                    scale,
                    Parallelism::None,
                );
                let p = std::slice::from_raw_parts_mut(p, rows * seq);
                softmax_rows(p, seq, row);
                if T::WIDEN {
                    round_rows::<T>(p);
                    if let Some(stored) = stored {
                        narrow(stored, seq, (rows, seq), p);
                    }
                }
            }
            if let Some(out) = out {
                let tensor = out.at(at);
                let (pointer, out_stride) = target(tensor, q_width, dim, out_copy);
                let sizes = (rows, dim, visible);
                // SAFETY: these rows and columns of the output belong to this task; `p` is as above.
                unsafe {
                    match mask {
                        None => product(
                            sizes,
                            pointer,
                            out_stride,
                            false,
                            Matrix::rows(p, stride),
                            values,
                            1.0,
                            Parallelism::None,
                        ),
                        Some(mask) => {
                            let p = std::slice::from_raw_parts(p, rows * seq);
                            let first = task.probs_offset(head, row) as u64;
                            dropped_product(sizes, pointer, out_stride, (p, first), values, mask)
                        }
                    }
                    narrow(tensor, q_width, (rows, dim), out_copy);
                }
            }
        }
    }
}

/// `out = p values` with `p` dropped, whose first element has the index `first`; its rows are whole.
///
/// # Safety
/// As for [`product`].
unsafe fn dropped_product(
    (rows, dim, visible): (usize, usize, usize),
    out: *mut f32,
    out_stride: usize,
    (p, first): (&[f32], u64),
    values: Matrix,
    mask: Mask,
) {
    let seq = p.len() / rows;
    let mut tile = [0.0; CPU_ROW_BLOCK * TILE_KEYS];
    for key in (0..visible).step_by(TILE_KEYS) {
        let keys = TILE_KEYS.min(visible - key);
        for (row, tile) in tile.chunks_exact_mut(keys).take(rows).enumerate() {
            let at = row * seq + key;
            tile.copy_from_slice(&p[at..at + keys]);
            drop_elements(tile, first + at as u64, 1, mask);
        }
        let tile = Matrix::rows(tile.as_ptr(), keys);
        let values = Matrix {
            pointer: values
                .pointer
                .wrapping_offset(key as isize * values.row_stride),
            ..values
        };
        let (sizes, none) = ((rows, dim, keys), Parallelism::None);
        // SAFETY: the caller's promise; the tile has room for its rows.
        unsafe { product(sizes, out, out_stride, key > 0, tile, values, 1.0, none) };
    }
}

/// Rounds to the stored type's precision, so that what is multiplied is what is stored.
fn round_rows<T: Real>(p: &mut [f32]) {
    p.iter_mut()
        .for_each(|value| *value = T::narrow(*value).widen());
}

vectorized! {
    /// Softmax of each row up to its diagonal; zero beyond. The first row is query `first`.
    fn softmax_rows(scores: &mut [f32], seq: usize, first: usize) {
        for (row, scores) in scores.chunks_exact_mut(seq).enumerate() {
            let (scores, hidden) = scores.split_at_mut(first + row + 1);
            let largest = lane_max(scores);
            scores.iter_mut().for_each(|score| *score = exp(*score - largest));
            let factor = 1.0 / lane_sum([&*scores], |[score]| score);
            scores.iter_mut().for_each(|score| *score *= factor);
            hidden.fill(0.0);
        }
    }

    /// `dp` becomes the gradient of the scores before scaling: p (dp - sum(p dp)), row by row.
    fn softmax_backward_rows(dp: &mut [f32], p: &[f32], seq: usize, visible: usize) {
        for (dp, p) in dp.chunks_exact_mut(seq).zip(p.chunks_exact(seq)) {
            let (dp, p) = (&mut dp[..visible], &p[..visible]);
            let dot = lane_sum([p, &*dp], |[p, dp]| p * dp);
            dp.iter_mut().zip(p).for_each(|(dp, p)| *dp = p * (*dp - dot));
        }
    }
}

pub(super) fn attention_backward(operation: AttentionBackward) {
    by_dtype!(operation.q.dtype(), attention_backward_of(operation));
}

fn attention_backward_of<T: Real>(operation: AttentionBackward) {
    let AttentionBackward {
        dq,
        dk,
        dv,
        scratch,
        dout,
        probs,
        q,
        k,
        v,
        shape,
        dropout,
    } = operation;
    let mask = Mask::of(dropout);
    let outputs = [dq, dk, dv].map(|out| Shared(out.pointer().cast::<T>()));
    let (dout, probs) = (dout.slice::<T>(), probs.slice::<T>());
    let inputs = (q.slice::<T>(), k.slice::<T>(), v.slice::<T>());
    for_each_task(shape, scratch.slice_mut(), |task, scratch| {
        backward_task(task, mask, outputs, scratch, dout, probs, inputs)
    });
}

fn backward_task<T: Real>(
    task: Task,
    mask: Option<Mask>,
    [dq, dk, dv]: [Shared<T>; 3],
    scratch: &mut [f32],
    dout: &[T],
    probs: &[T],
    (q, k, v): (&[T], &[T], &[T]),
) {
    let (seq, dim) = (task.shape.seq, task.shape.head_dim);
    let (q_width, kv_width) = (task.q_width(), task.kv_width());
    let block = CPU_ROW_BLOCK.min(seq);
    let mut pieces = Pieces(scratch);
    let dp = pieces.take(block * seq);
    let p_copy = pieces.take_if(T::WIDEN, block * seq);
    let [q_copy, dout_copy, dq_copy] = [(); 3].map(|()| pieces.take_if(T::WIDEN, block * dim));
    let [k_copy, v_copy, dk_copy, dv_copy] = [(); 4].map(|()| pieces.take_if(T::WIDEN, seq * dim));
    let at = task.kv_offset();
    // SAFETY: the task's rows of k and v lie in the tensors.
    let keys = unsafe { panel(k[at..].as_ptr(), kv_width, (seq, dim), k_copy) };
    // SAFETY: as above.
    let values = unsafe { panel(v[at..].as_ptr(), kv_width, (seq, dim), v_copy) };
    let (dk_sum, dk_stride) = target(dk.at(at), kv_width, dim, dk_copy);
    let (dv_sum, dv_stride) = target(dv.at(at), kv_width, dim, dv_copy);
    for row in 0..seq {
        // SAFETY: these rows and columns of dk and dv, or of their copies, belong to this task.
        unsafe {
            std::slice::from_raw_parts_mut(dk_sum.wrapping_add(row * dk_stride), dim).fill(0.0);
            std::slice::from_raw_parts_mut(dv_sum.wrapping_add(row * dv_stride), dim).fill(0.0);
        }
    }
    for head in task.heads() {
        for (row, rows) in task.row_blocks() {
            let visible = row + rows;
            let (at, probs_at) = (task.q_offset(head, row), task.probs_offset(head, row));
            let scale = task.shape.scale();
            let none = Parallelism::None;
            // SAFETY: every panel lies in its tensor or has room in its copy; dq's rows and columns of this head,
            // and the sums, belong to this task.
            unsafe {
                let queries = panel(q[at..].as_ptr(), q_width, (rows, dim), q_copy);
                let douts = panel(dout[at..].as_ptr(), q_width, (rows, dim), dout_copy);
                let p = panel(probs[probs_at..].as_ptr(), seq, (rows, seq), p_copy);
                let stored = std::slice::from_raw_parts(p.pointer, rows * seq);
                let dp = &mut dp[..rows * seq];
                let weights = match mask {
                    None => p,
                    Some(mask) => {
                        dp.copy_from_slice(stored);
                        drop_elements(dp, probs_at as u64, 1, mask);
                        Matrix::rows(dp.as_ptr(), seq)
                    }
                };
                product(
                    (visible, dim, rows),
                    dv_sum,
                    dv_stride,
                    true,
                    weights.t(),
                    douts,
                    1.0,
                    none,
                );
                product(
                    (rows, visible, dim),
                    dp.as_mut_ptr(),
                    seq,
                    false,
                    douts,
                    values.t(),
                    1.0,
                    none,
                );
                if let Some(mask) = mask {
                    drop_elements(dp, probs_at as u64, 1, mask);
                }
                softmax_backward_rows(dp, stored, seq, visible);
                let ds = Matrix::rows(dp.as_ptr(), seq);
                let (dq_rows, dq_stride) = target(dq.at(at), q_width, dim, dq_copy);
                product(
                    (rows, dim, visible),
                    dq_rows,
                    dq_stride,
                    false,
                    ds,
                    keys,
                    scale,
                    none,
                );
                narrow(dq.at(at), q_width, (rows, dim), dq_copy);
                product(
                    (visible, dim, rows),
                    dk_sum,
                    dk_stride,
                    true,
                    ds.t(),
                    queries,
                    scale,
                    none,
                );
            }
        }
    }
    // SAFETY: as for the sums.
    unsafe {
        narrow(dk.at(at), kv_width, (seq, dim), dk_copy);
        narrow(dv.at(at), kv_width, (seq, dim), dv_copy);
    }
}
