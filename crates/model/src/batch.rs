//! The tokens of a micro-batch, uploaded.

use crate::{BatchShape, ModelError};
use kernels::Kernels;
use memory::{Buffer, Category, DType, Memory};

/// Token ids and targets of a micro-batch, in device memory.
pub struct Batch {
    /// Its sequences.
    pub shape: BatchShape,
    /// `[rows seq]` i32, each within the vocabulary.
    pub input_ids: Buffer,
    /// `[rows seq]` i32; negative: masked.
    pub targets: Buffer,
}

impl Batch {
    /// Leases and uploads a micro-batch.
    ///
    /// # Errors
    /// [`ModelError`] if memory is refused or the slices have other lengths.
    pub fn upload(
        memory: &Memory,
        kernels: &dyn Kernels,
        shape: BatchShape,
        input_ids: &[i32],
        targets: &[i32],
    ) -> Result<Batch, ModelError> {
        let send = |name, data: &[i32]| -> Result<Buffer, ModelError> {
            let mut buffer = memory.lease(Category::Input, name, [shape.tokens()], DType::I32)?;
            kernels.upload(buffer.view_mut(), bytemuck::cast_slice(data))?;
            Ok(buffer)
        };
        Ok(Batch {
            shape,
            input_ids: send("input_ids", input_ids)?,
            targets: send("targets", targets)?,
        })
    }
}
