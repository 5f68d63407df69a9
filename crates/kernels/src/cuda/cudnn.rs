//! Attention by cuDNN: where in the scratch the library finds what.

use super::{
    AttentionPass, AttentionTensors, BackwardTensors, Cuda, Driver, LibraryAttention, LibraryShape,
    Workspace,
};
use crate::operation::flash::CudnnScratch;
use crate::operation::{FlashAttention, FlashAttentionBackward};
use crate::{AttentionShape, KernelError};
use memory::{In, Out};

/// Bytes that are leased for the library's own workspace, beside what it is handed by name.
pub fn cudnn_workspace_bytes(shape: LibraryShape, pass: AttentionPass) -> usize {
    cudnn_scratch(shape, pass).workspace
}

/// The scratch of a pass that writes all of its outputs.
pub(super) fn cudnn_scratch(shape: LibraryShape, pass: AttentionPass) -> CudnnScratch {
    match pass {
        AttentionPass::Forward => CudnnScratch::forward(shape.sizes, shape.documents, [true; 2]),
        AttentionPass::Backward => CudnnScratch::backward(shape.sizes, shape.documents),
    }
}

/// The sizes, how far apart rows are, and how many documents there may be.
fn library_shape(sizes: AttentionShape, qkv: [&In; 3], documents: &Option<In>) -> LibraryShape {
    LibraryShape {
        sizes,
        row_strides: qkv.map(|x| x.strides()[0]),
        documents: documents.is_some().then(|| sizes.documents_max()),
    }
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
    let documents = &operation.options.documents;
    let has_outputs = [operation.out.is_some(), operation.lse.is_some()];
    let most = documents.is_some().then(|| shape.documents_max());
    let layout = CudnnScratch::forward(shape, most, has_outputs);
    let mut pieces = Pieces { scratch, used: 0 };
    // It always makes both, so that leaving one out changes no bit of the other.
    let [spare_out, spare_lse, ..] = layout.pieces.map(|bytes| pieces.next(bytes));
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
    let qkv = [&operation.q, &operation.k, &operation.v];
    cuda.attention(&LibraryAttention {
        shape: library_shape(shape, qkv, documents),
        tensors,
        documents: documents.as_ref().map(In::pointer),
        workspace,
    })
}

pub(super) fn attention_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: FlashAttentionBackward,
) -> Result<(), KernelError> {
    let (shape, scratch) = (operation.shape, &operation.scratch);
    let documents = &operation.options.documents;
    let most = documents.is_some().then(|| shape.documents_max());
    let layout = CudnnScratch::backward(shape, most);
    let mut pieces = Pieces { scratch, used: 0 };
    let [dq_sums, row_sums, of_dk, of_dv] = layout.pieces.map(|bytes| pieces.next(bytes));
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
        of_heads: [of_dk, of_dv],
    });
    let workspace = pieces.rest();
    let qkv = [&operation.q, &operation.k, &operation.v];
    cuda.attention(&LibraryAttention {
        shape: library_shape(shape, qkv, documents),
        tensors,
        documents: documents.as_ref().map(In::pointer),
        workspace,
    })
}
