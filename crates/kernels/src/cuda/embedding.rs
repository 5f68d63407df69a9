//! Token embedding.

use super::extent::Extent;
use super::{Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::operation::{Embedding, EmbeddingBackward};
use crate::{Init, KernelError};
use memory::DType;

/// Threads of a block that looks for tokens: as in `embedding.cu`.
const SEARCHERS: usize = 256;

pub(super) fn embedding<D: Driver>(
    cuda: &Cuda<D>,
    Embedding { out, table, ids }: Embedding,
) -> Result<(), KernelError> {
    let kernel = kernel!("embedding", "embedding", table.dtype());
    let (tokens, width) = (out.dims()[0], out.dims()[1]);
    let arguments = [(&out).into(), (&table).into(), (&ids).into(), width.into()];
    cuda.launch(kernel, Extent::rows(tokens, width), &arguments)
}

pub(super) fn embedding_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: EmbeddingBackward,
) -> Result<(), KernelError> {
    let EmbeddingBackward {
        dtable,
        dout,
        ids,
        init,
    } = operation;
    if matches!(init, Init::Overwrite) {
        let bytes = dtable.bytes();
        // SAFETY: the view covers these bytes.
        unsafe { cuda.driver.clear(dtable.pointer(), bytes)? };
    }
    let kernel = kernel!(
        "embedding",
        "embedding_backward",
        dtable.dtype(),
        dout.dtype()
    );
    let (tokens, width) = (dout.dims()[0], dout.dims()[1]);
    let arguments = [
        (&dtable).into(),
        (&dout).into(),
        (&ids).into(),
        tokens.into(),
        width.into(),
        accumulates(&init),
    ];
    let extent = Extent::rows_by_columns(tokens, width, SEARCHERS);
    cuda.launch(kernel, extent, &arguments)
}
