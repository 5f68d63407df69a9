//! Uploads a micro-batch.

use data::MicroBatch;
use kernels::Kernels;
use memory::{In, Memory, Rank};
use model::{Batch, BatchShape, ModelError};

/// The tokens of a step's micro-batches, one after the other, in device memory of another library. The step's batch has
/// the same tokens on the host, where its targets are counted. All micro-batches have the same shape.
#[derive(Clone, Copy)]
pub struct LentTokens {
    /// `[tokens]` i32.
    pub input_ids: In<'static>,
    /// `[tokens]` i32.
    pub targets: In<'static>,
}

impl LentTokens {
    /// The tokens of one micro-batch, by its number.
    pub(crate) fn of(self, number: usize, micro: &MicroBatch) -> LentTokens {
        let tokens = micro.rows * micro.seq;
        let range = number * tokens..(number + 1) * tokens;
        LentTokens {
            input_ids: self.input_ids.rows(range.clone()),
            targets: self.targets.rows(range),
        }
    }
}

/// Leases and uploads a micro-batch for a model, with the beginnings of packed documents. Lent tokens are not copied.
pub(crate) fn upload(
    memory: &Memory,
    kernels: &Kernels,
    micro: &MicroBatch,
    lent: Option<LentTokens>,
) -> Result<Batch, ModelError> {
    let MicroBatch {
        rows, seq, part, ..
    } = *micro;
    let shape = BatchShape { rows, seq };
    let batch = match lent {
        Some(lent) => Batch::lent(memory, shape, lent.input_ids, lent.targets)?,
        None => Batch::upload(memory, kernels, shape, &micro.input_ids, &micro.targets)?,
    };
    let Some(starts) = &micro.documents else {
        return match part {
            Rank::ALONE => Ok(batch),
            part => batch.from_position(memory, kernels, part.number * seq),
        };
    };
    batch.with_documents(memory, kernels, starts, part)
}
