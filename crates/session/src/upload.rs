//! A micro-batch onto the device.

use data::MicroBatch;
use kernels::Kernels;
use memory::{In, Memory};
use model::{Batch, BatchShape, ModelError};

/// The tokens of a step's micro-batches, one after the other, where another library has them on the device. The step's batch
/// has the same: from it their targets are counted.
#[derive(Clone, Copy)]
pub struct LentTokens {
    /// `[tokens]` i32.
    pub input_ids: In<'static>,
    /// `[tokens]` i32.
    pub targets: In<'static>,
}

impl LentTokens {
    /// Those of a micro-batch by its number, of which all have as many.
    pub(crate) fn of(self, number: usize, micro: &MicroBatch) -> LentTokens {
        let tokens = micro.rows * micro.seq;
        let range = number * tokens..(number + 1) * tokens;
        LentTokens {
            input_ids: self.input_ids.rows(range.clone()),
            targets: self.targets.rows(range),
        }
    }
}

/// Leases and uploads a micro-batch, and where its documents begin if they are packed. Tokens that are lent stay where they are.
pub(crate) fn upload(
    memory: &Memory,
    kernels: &Kernels,
    micro: &MicroBatch,
    lent: Option<LentTokens>,
) -> Result<Batch, ModelError> {
    let MicroBatch { rows, seq, .. } = *micro;
    let shape = BatchShape { rows, seq };
    let batch = match lent {
        Some(lent) => Batch::lent(memory, shape, lent.input_ids, lent.targets)?,
        None => Batch::upload(memory, kernels, shape, &micro.input_ids, &micro.targets)?,
    };
    match &micro.documents {
        Some(starts) => batch.with_documents(memory, kernels, starts),
        None => Ok(batch),
    }
}
