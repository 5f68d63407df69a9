//! Causal attention with stored probabilities, one sequence at a time.
//!
//! The scores of all heads of a sequence are f32 in the scratch. Their softmax and its gradient replace them there in
//! the compute type. Products always read these, so that leaving an output out changes no bit. Dropped probabilities
//! are in the scratch too. Stored ones have no dropout applied, so the backward pass drops elements in the scratch
//! again.
//!
//! A key-value head serves `group` query heads. Products run for one member of each group at a time, batched over
//! key-value heads, so that sums into dk and dv have a fixed order.

use super::dropout::dropout_arguments;
use super::extent::Extent;
use super::sinks::sink_gradient;
use super::{Argument, Cuda, Driver, Gemm, Kernel, Matrix, arguments, kernel};
use crate::operation::{Attention, AttentionBackward};
use crate::{AttentionShape, Dropout, Positive, Result};
use memory::{DType, In, Out};

/// The scores of one sequence, kept in f32.
pub(crate) fn scores(shape: AttentionShape) -> usize {
    shape.heads * shape.seq * shape.seq
}

/// Sums of dk and dv of one sequence, kept in f32 if bf16 would round each query head's part.
pub(crate) fn gradient_sums(shape: AttentionShape, dtype: DType) -> usize {
    match dtype {
        DType::BF16 if shape.group() > 1 => {
            shape.seq * shape.kv_heads * (shape.qk_head_dim + shape.v_head_dim)
        }
        _ => 0,
    }
}

/// The scratch of the backward pass for one sequence: gradients of scores with sums of dk and dv, then scores if they have a cap.
fn backward_parts(shape: AttentionShape, dtype: DType) -> [usize; 2] {
    let gradients = scores(shape).next_multiple_of(64) + gradient_sums(shape, dtype);
    match shape.cap {
        Some(_) => [gradients.next_multiple_of(64), scores(shape)],
        None => [gradients, 0],
    }
}

/// The sum of [`backward_parts`].
pub(crate) fn backward_scratch(shape: AttentionShape, dtype: DType) -> usize {
    backward_parts(shape, dtype).iter().sum()
}

/// The scale and the cap as arguments of flash and cached attention: the factor on scores before the softmax, which is 1 if they are capped;
/// the cap, or 0 if there is none; and the factor on products of queries and keys inside the cap's tanh.
pub(super) fn score_arguments(shape: AttentionShape) -> [Argument; 3] {
    match shape.cap.map(Positive::get) {
        Some(cap) => arguments![1.0, cap, shape.scale() / cap],
        None => arguments![shape.scale(), 0.0, 0.0],
    }
}

/// The factor on products of queries and keys. With a cap it includes the division by it, so the product is the tanh's argument.
fn score_factor(shape: AttentionShape) -> f32 {
    shape.scale() / shape.cap.map_or(1.0, Positive::get)
}

/// One member of every group in one sequence, and where its matrices lie.
#[derive(Clone, Copy)]
struct Member {
    shape: AttentionShape,
    sequence: usize,
    member: usize,
}

impl Member {
    /// Matrices `[seq, dim]` of the query heads in a tensor of them.
    fn of_queries(&self, tensor: *const u8, dtype: DType, dim: usize) -> Matrix {
        let AttentionShape { seq, heads, .. } = self.shape;
        let first = (self.sequence * seq * heads + self.member) * dim;
        Matrix {
            pointer: offset(tensor, dtype, first),
            dtype,
            row_stride: heads * dim,
            column_stride: 1,
            batch_stride: self.shape.group() * dim,
        }
    }

    /// Matrices `[seq, dim]` of the key-value heads in a tensor of them.
    fn of_keys(&self, tensor: *const u8, dtype: DType, dim: usize) -> Matrix {
        let width = self.shape.kv_heads * dim;
        Matrix {
            pointer: offset(tensor, dtype, self.sequence * self.shape.seq * width),
            ..self.sums(tensor, dtype, dim)
        }
    }

    /// Matrices `[seq, dim]` of the key-value heads of this sequence alone.
    fn sums(&self, pointer: *const u8, dtype: DType, dim: usize) -> Matrix {
        Matrix {
            pointer,
            dtype,
            row_stride: self.shape.kv_heads * dim,
            column_stride: 1,
            batch_stride: dim,
        }
    }

    /// Matrices `[seq, seq]` in the scratch: the f32 scores, or what replaced them.
    fn scores(&self, scratch: &Out, dtype: DType) -> Matrix {
        let seq = self.shape.seq;
        let row_stride = seq * DType::F32.size_in_bytes() / dtype.size_in_bytes();
        Matrix {
            pointer: offset(scratch.pointer(), dtype, self.member * seq * row_stride),
            dtype,
            row_stride,
            column_stride: 1,
            batch_stride: self.shape.group() * seq * row_stride,
        }
    }

    /// Matrices `[seq, seq]` of the stored probabilities.
    fn probs(&self, probs: &In) -> Matrix {
        let AttentionShape { seq, heads, .. } = self.shape;
        let first = (self.sequence * heads + self.member) * seq * seq;
        Matrix {
            pointer: offset(probs.pointer(), probs.dtype(), first),
            dtype: probs.dtype(),
            row_stride: seq,
            column_stride: 1,
            batch_stride: self.shape.group() * seq * seq,
        }
    }

    /// `out = a b`, m by k by n, for each key-value head.
    fn product(&self, sizes: [usize; 3], a: Matrix, b: Matrix, out: Matrix) -> Gemm {
        Gemm {
            sizes,
            batch: self.shape.kv_heads,
            alpha: 1.0,
            a,
            b,
            init: None,
            bias: None,
            out,
            scales: None,
            fast_accumulation: false,
        }
    }

    /// Adds up products over the members of a group.
    fn sum(&self, sizes: [usize; 3], a: Matrix, b: Matrix, out: Matrix) -> Gemm {
        Gemm {
            init: (self.member > 0).then_some(out),
            ..self.product(sizes, a, b, out)
        }
    }
}

fn offset(tensor: *const u8, dtype: DType, elements: usize) -> *const u8 {
    tensor.wrapping_add(elements * dtype.size_in_bytes())
}

/// Where a sequence's numbers are in a tensor `[b, heads, s]`, if there is one.
fn statistics(tensor: Option<*const u8>, shape: AttentionShape, sequence: usize) -> Argument {
    let first = sequence * shape.heads * shape.seq;
    tensor.map_or(Argument::NULL, |tensor| {
        Argument::Pointer(offset(tensor, DType::F32, first))
    })
}

/// The stored probabilities of a sequence.
fn sequence_probs(probs: &In, shape: AttentionShape, sequence: usize) -> Argument {
    let first = sequence * scores(shape);
    Argument::Pointer(offset(probs.pointer(), probs.dtype(), first))
}

fn members(shape: AttentionShape, sequence: usize) -> impl Iterator<Item = Member> {
    (0..shape.group()).map(move |member| Member {
        shape,
        sequence,
        member,
    })
}

/// The scores of a sequence in f32, before a cap and the softmax.
fn find_scores<D: Driver>(
    cuda: &Cuda<D>,
    scratch: &Out,
    [q, k]: [&In; 2],
    (shape, sequence): (AttentionShape, usize),
) -> Result {
    let (seq, dim) = (shape.seq, shape.qk_head_dim);
    for member in members(shape, sequence) {
        let queries = member.of_queries(q.pointer(), q.dtype(), dim);
        let keys = member.of_keys(k.pointer(), k.dtype(), dim);
        let scores = member.scores(scratch, DType::F32);
        cuda.gemm(&Gemm {
            alpha: score_factor(shape),
            ..member.product([seq, dim, seq], queries, keys.t(), scores)
        })?;
    }
    Ok(())
}

pub(super) fn attention<D: Driver>(cuda: &Cuda<D>, op: Attention) -> Result {
    let (shape, dtype) = (op.shape, op.q.dtype());
    let (seq, v_dim) = (shape.seq, shape.v_head_dim);
    let kernel = match shape.cap {
        None => kernel!("attention", "attention_softmax", dtype),
        Some(_) => kernel!("attention", "attention_softmax_capped", dtype),
    };
    let cap = shape.cap.map_or(0.0, Positive::get);
    for sequence in 0..shape.batch {
        find_scores(cuda, &op.scratch, [&op.q, &op.k], (shape, sequence))?;
        let kept = op.probs.as_ref().map_or(std::ptr::null(), |probs| {
            offset(probs.pointer(), dtype, sequence * scores(shape))
        });
        let lse = op.lse.as_ref().map(|lse| lse.as_in().pointer());
        let lse = statistics(lse, shape, sequence);
        let first = arguments! {
            Argument::Pointer(kept), lse, &op.scratch, &op.sinks, cap, shape.reach(),
        };
        launch_rows(cuda, kernel, &first, (shape, sequence), op.dropout)?;
        for member in members(shape, sequence) {
            if let Some(out) = &op.out {
                let weights = member.scores(&op.scratch, dtype);
                let values = member.of_keys(op.v.pointer(), dtype, v_dim);
                let out = member.of_queries(out.pointer(), dtype, v_dim);
                cuda.gemm(&member.product([seq, seq, v_dim], weights, values, out))?;
            }
        }
    }
    Ok(())
}

/// The scratch of the backward pass, in f32.
struct BackwardScratch<'a> {
    /// Of one sequence: gradients of probabilities, which those of scores replace, and sums of dk and dv behind them.
    gradients: Out<'a>,
    /// Of one sequence: its scores, if they have a cap.
    scores: Out<'a>,
    /// Of all sequences: the sums of dout * out of each row, if sinks have a gradient.
    row_sums: Option<Out<'a>>,
}

impl<'a> BackwardScratch<'a> {
    fn new(
        scratch: Out<'a>,
        (shape, dtype): (AttentionShape, DType),
        sums_rows: bool,
    ) -> BackwardScratch<'a> {
        let [gradients, scores] = backward_parts(shape, dtype);
        let (gradients, rest) = scratch.split_at(gradients);
        let (scores, row_sums) = rest.split_at(scores);
        BackwardScratch {
            gradients,
            scores,
            row_sums: sums_rows.then_some(row_sums),
        }
    }
}

pub(super) fn attention_backward<D: Driver>(cuda: &Cuda<D>, op: AttentionBackward) -> Result {
    let dropout = op.dropout.and_then(Dropout::effective);
    let (shape, dtype) = (op.shape, op.q.dtype());
    let (seq, [qk_dim, v_dim]) = (shape.seq, shape.head_dims());
    let drop = kernel!("attention", "attention_drop", dtype);
    let scratch = BackwardScratch::new(op.scratch, (shape, dtype), op.dsinks.is_some());
    for sequence in 0..shape.batch {
        let sums = GradientSums::new(shape, sequence, &scratch.gradients, [&op.dk, &op.dv]);
        if dropout.is_some() {
            let probs = sequence_probs(&op.probs, shape, sequence);
            let tensors = arguments![&scratch.gradients, probs];
            launch_rows(cuda, drop, &tensors, (shape, sequence), dropout)?;
        }
        for member in members(shape, sequence) {
            let gradients = member.of_queries(op.dout.pointer(), dtype, v_dim);
            let weights = match dropout {
                Some(_) => member.scores(&scratch.gradients, dtype),
                None => member.probs(&op.probs),
            };
            let [_, dv] = sums.matrices(member);
            cuda.gemm(&member.sum([seq, seq, v_dim], weights.t(), gradients, dv))?;
        }
        let operands = [&op.q, &op.k, &op.v, &op.dout, &op.probs];
        score_gradients(cuda, &scratch, operands, (shape, sequence), dropout)?;
        for member in members(shape, sequence) {
            let scores = member.scores(&scratch.gradients, dtype);
            let queries = member.of_queries(op.q.pointer(), dtype, qk_dim);
            let keys = member.of_keys(op.k.pointer(), dtype, qk_dim);
            let dq = member.of_queries(op.dq.pointer(), dtype, qk_dim);
            let [dk, _] = sums.matrices(member);
            let alpha = shape.scale();
            cuda.gemm(&Gemm {
                alpha,
                ..member.product([seq, seq, qk_dim], scores, keys, dq)
            })?;
            cuda.gemm(&Gemm {
                alpha,
                ..member.sum([seq, seq, qk_dim], scores.t(), queries, dk)
            })?;
        }
        sums.round(cuda)?;
    }
    match (&op.dsinks, &op.sinks, &op.lse, &scratch.row_sums) {
        (Some(dsinks), Some(sinks), Some(lse), Some(row_sums)) => {
            let gradient = (dsinks, &op.dsinks_init);
            sink_gradient(cuda, gradient, [sinks, lse, &row_sums.as_in()], shape)
        }
        _ => Ok(()),
    }
}

/// Leaves the gradients of a sequence's scores in the scratch, and the sums of their rows, if there is a place for them.
fn score_gradients<D: Driver>(
    cuda: &Cuda<D>,
    scratch: &BackwardScratch,
    [q, k, v, dout, probs]: [&In; 5],
    (shape, sequence): (AttentionShape, usize),
    dropout: Option<Dropout>,
) -> Result {
    let (seq, v_dim, dtype) = (shape.seq, shape.v_head_dim, q.dtype());
    let kernel = match shape.cap {
        None => kernel!("attention", "attention_softmax_backward", dtype),
        Some(_) => kernel!("attention", "attention_softmax_backward_capped", dtype),
    };
    for member in members(shape, sequence) {
        let gradients = member.of_queries(dout.pointer(), dtype, v_dim);
        let values = member.of_keys(v.pointer(), dtype, v_dim);
        let scores = member.scores(&scratch.gradients, DType::F32);
        cuda.gemm(&member.product([seq, v_dim, seq], gradients, values.t(), scores))?;
    }
    if shape.cap.is_some() {
        find_scores(cuda, &scratch.scores, [q, k], (shape, sequence))?;
    }
    let row_sums = scratch.row_sums.as_ref();
    let row_sums = row_sums.map(|sums| sums.as_in().pointer());
    let row_sums = statistics(row_sums, shape, sequence);
    let probs = sequence_probs(probs, shape, sequence);
    let tensors = arguments![&scratch.gradients, row_sums, probs, &scratch.scores];
    launch_rows(cuda, kernel, &tensors, (shape, sequence), dropout)
}

/// Launches a kernel on the rows of a sequence's scores. Elements count from the first of all sequences, as
/// [`Dropout`] numbers them.
fn launch_rows<D: Driver>(
    cuda: &Cuda<D>,
    kernel: Kernel,
    first: &[Argument],
    (shape, sequence): (AttentionShape, usize),
    dropout: Option<Dropout>,
) -> Result {
    let [threshold, key, scale] = dropout_arguments(dropout);
    let first_element = sequence * scores(shape);
    let of_rows = arguments![shape.seq, first_element, threshold, key, scale];
    let extent = Extent::rows(shape.heads * shape.seq, shape.seq);
    cuda.launch(kernel, extent, &[first, &of_rows].concat())
}

/// Where dk and dv of a sequence are summed. It is in the tensors, or in separate f32 sums if bf16 would round every
/// member's part.
struct GradientSums {
    shape: AttentionShape,
    dtype: DType,
    /// Elements of the sequence in dk and in dv.
    elements: [usize; 2],
    /// Where it starts in them.
    tensors: [*const u8; 2],
    /// The f32 sums of both.
    sums: Option<[*const u8; 2]>,
}

impl GradientSums {
    fn new(shape: AttentionShape, sequence: usize, scratch: &Out, tensors: [&Out; 2]) -> Self {
        let dtype = tensors[0].dtype();
        let elements = shape
            .head_dims()
            .map(|dim| shape.seq * shape.kv_heads * dim);
        let sums = (gradient_sums(shape, dtype) > 0).then(|| {
            let first = scores(shape).next_multiple_of(64);
            [first, first + elements[0]].map(|at| offset(scratch.pointer(), DType::F32, at))
        });
        let start =
            |which: usize| offset(tensors[which].pointer(), dtype, sequence * elements[which]);
        GradientSums {
            shape,
            dtype,
            elements,
            tensors: [0, 1].map(start),
            sums,
        }
    }

    /// The matrices of dk and dv that products are added to.
    fn matrices(&self, member: Member) -> [Matrix; 2] {
        let ([dk, dv], dtype) = match self.sums {
            Some(sums) => (sums, DType::F32),
            None => (self.tensors, self.dtype),
        };
        let [qk_dim, v_dim] = self.shape.head_dims();
        [
            member.sums(dk, dtype, qk_dim),
            member.sums(dv, dtype, v_dim),
        ]
    }

    /// Rounds f32 sums into the tensors.
    fn round<D: Driver>(&self, cuda: &Cuda<D>) -> Result {
        let Some(sums) = self.sums else {
            return Ok(());
        };
        let kernel = kernel!("elementwise", "copy", self.dtype, DType::F32);
        for (which, n) in self.elements.into_iter().enumerate() {
            let [tensor, sum] = [self.tensors[which], sums[which]].map(Argument::Pointer);
            cuda.launch(kernel, Extent::flat(n), &arguments![tensor, sum, n])?;
        }
        Ok(())
    }
}
