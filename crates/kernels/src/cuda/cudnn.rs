//! Attention by cuDNN: what a driver is asked for, and where in the scratch the library finds what.

use super::{Cuda, Driver, Workspace};
use crate::operation::flash::CudnnScratch;
use crate::operation::{FlashAttention, FlashAttentionBackward};
use crate::{AttentionShape, KernelError};
use memory::Out;

/// Causal attention as a library computes it: bf16, no documents, nothing dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LibraryAttention {
    /// Its sizes.
    pub shape: AttentionShape,
    /// What is read and written.
    pub tensors: AttentionTensors,
    /// What the library may use beside that.
    pub workspace: Workspace,
}

/// A direction of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionPass {
    /// Output and log-sum-exp.
    Forward,
    /// Gradients.
    Backward,
}

/// The first elements of the tensors of an attention; each as its operation has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttentionTensors {
    /// `out` and `lse` are written.
    Forward {
        /// `[b, s, heads, d]` bf16.
        q: *const u8,
        /// `[b, s, kv_heads, d]` bf16.
        k: *const u8,
        /// Like `k`.
        v: *const u8,
        /// Like `q`.
        out: *const u8,
        /// `[b, heads, s]` f32.
        lse: *const u8,
    },
    /// The gradients are written.
    Backward(BackwardTensors),
}

/// Tensors of the backward pass: `dq`, `dk` and `dv` are written, and what is needed for them.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "they are those of `FlashAttentionBackward`")]
pub struct BackwardTensors {
    pub q: *const u8,
    pub k: *const u8,
    pub v: *const u8,
    pub out: *const u8,
    pub lse: *const u8,
    pub dout: *const u8,
    pub dq: *const u8,
    pub dk: *const u8,
    pub dv: *const u8,
    /// f32 sums of `dq`, `[b, heads, s, d]`.
    pub dq_sums: *const u8,
    /// Row sums of `dout * out`, `[b, heads, s]` f32.
    pub row_sums: *const u8,
}

impl LibraryAttention {
    /// Its direction.
    pub fn pass(&self) -> AttentionPass {
        match self.tensors {
            AttentionTensors::Forward { .. } => AttentionPass::Forward,
            AttentionTensors::Backward(_) => AttentionPass::Backward,
        }
    }
}

impl AttentionPass {
    /// The name of its operation.
    pub fn operation(self) -> &'static str {
        match self {
            AttentionPass::Forward => "flash_attention",
            AttentionPass::Backward => "flash_attention_backward",
        }
    }
}

/// Bytes that are leased for the library's own workspace, beside what it is handed by name.
pub fn cudnn_workspace_bytes(shape: AttentionShape, pass: AttentionPass) -> usize {
    let scratch = match pass {
        AttentionPass::Forward => CudnnScratch::forward(shape, true, true),
        AttentionPass::Backward => CudnnScratch::backward(shape),
    };
    scratch.workspace
}

/// Bytes of scratch, given out one after the other.
struct Pieces<'a> {
    scratch: &'a Out<'a>,
    used: usize,
}

impl Pieces<'_> {
    fn next(&mut self, bytes: usize) -> *const u8 {
        let at = self.scratch.pointer().wrapping_add(self.used);
        self.used += bytes;
        at.cast_const()
    }

    /// Everything that is left.
    fn rest(self) -> Workspace {
        let bytes = self.scratch.elements() * size_of::<f32>() - self.used;
        Workspace {
            pointer: self.scratch.pointer().wrapping_add(self.used).cast_const(),
            bytes,
        }
    }
}

pub(super) fn attention<D: Driver>(
    cuda: &Cuda<D>,
    operation: FlashAttention,
) -> Result<(), KernelError> {
    let (shape, scratch) = (operation.shape, &operation.scratch);
    let layout = CudnnScratch::forward(shape, operation.out.is_some(), operation.lse.is_some());
    let mut pieces = Pieces { scratch, used: 0 };
    // It always makes both, so that leaving one out changes no bit of the other.
    let [spare_out, spare_lse] = layout.pieces.map(|bytes| pieces.next(bytes));
    let or_spare =
        |out: &Option<Out>, spare| out.as_ref().map_or(spare, |out| out.pointer().cast_const());
    let tensors = AttentionTensors::Forward {
        q: operation.q.pointer(),
        k: operation.k.pointer(),
        v: operation.v.pointer(),
        out: or_spare(&operation.out, spare_out),
        lse: or_spare(&operation.lse, spare_lse),
    };
    let workspace = pieces.rest();
    cuda.attention(&LibraryAttention {
        shape,
        tensors,
        workspace,
    })
}

pub(super) fn attention_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: FlashAttentionBackward,
) -> Result<(), KernelError> {
    let (shape, scratch) = (operation.shape, &operation.scratch);
    let layout = CudnnScratch::backward(shape);
    let mut pieces = Pieces { scratch, used: 0 };
    let [dq_sums, row_sums] = layout.pieces.map(|bytes| pieces.next(bytes));
    let tensors = AttentionTensors::Backward(BackwardTensors {
        q: operation.q.pointer(),
        k: operation.k.pointer(),
        v: operation.v.pointer(),
        out: operation.out.pointer(),
        lse: operation.lse.pointer(),
        dout: operation.dout.pointer(),
        dq: operation.dq.pointer(),
        dk: operation.dk.pointer(),
        dv: operation.dv.pointer(),
        dq_sums,
        row_sums,
    });
    let workspace = pieces.rest();
    cuda.attention(&LibraryAttention {
        shape,
        tensors,
        workspace,
    })
}
