//! A micro-batch onto the device.

use data::MicroBatch;
use kernels::Kernels;
use memory::Memory;
use model::{Batch, BatchShape, ModelError};

/// Leases and uploads a micro-batch, and where its documents begin if they are packed.
pub(crate) fn upload(
    memory: &Memory,
    kernels: &Kernels,
    micro: &MicroBatch,
) -> Result<Batch, ModelError> {
    let MicroBatch { rows, seq, .. } = *micro;
    let shape = BatchShape { rows, seq };
    let batch = Batch::upload(memory, kernels, shape, &micro.input_ids, &micro.targets)?;
    match &micro.documents {
        Some(starts) => batch.with_documents(memory, kernels, starts),
        None => Ok(batch),
    }
}
