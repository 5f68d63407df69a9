//! Token embedding.

use super::extent::Extent;
use super::{Cuda, Driver, accumulates, arguments, kernel};
use crate::operation::{Embedding, EmbeddingBackward};
use crate::{Init, Result};

/// Threads of a block that looks for tokens: as in `embedding.cu`.
const SEARCHERS: usize = 256;

pub(super) fn embedding<D: Driver>(cuda: &Cuda<D>, op: Embedding) -> Result {
    let kernel = kernel!("embedding", "embedding", op.table.dtype());
    let (tokens, width) = (op.out.dims()[0], op.out.dims()[1]);
    let arguments = arguments![&op.out, &op.table, &op.ids, width];
    cuda.launch(kernel, Extent::rows(tokens, width), &arguments)
}

pub(super) fn embedding_backward<D: Driver>(cuda: &Cuda<D>, op: EmbeddingBackward) -> Result {
    if matches!(op.init, Init::Overwrite) {
        // SAFETY: the view covers these bytes.
        unsafe { cuda.driver.clear(op.dtable.pointer(), op.dtable.bytes())? };
    }
    let types = [op.dtable.dtype(), op.dout.dtype()];
    let kernel = kernel!("embedding", "embedding_backward", types[0], types[1]);
    let (tokens, width) = (op.dout.dims()[0], op.dout.dims()[1]);
    let arguments = arguments! {
        &op.dtable, &op.dout, &op.ids, tokens, width, accumulates(&op.init),
    };
    let extent = Extent::rows_by_columns(tokens, width, SEARCHERS);
    cuda.launch(kernel, extent, &arguments)
}
