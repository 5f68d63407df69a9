//! The optimizer's states out of a checkpoint's files. A run with other formats can read them too: what is stored otherwise is
//! converted through f32.

use crate::error::{OptimizerStateError, SessionError};
use crate::session::Session;
use files::{Tensor, TensorFiles};
use memory::DType;
use optim::SavedState;
use std::path::Path;

impl Session {
    /// Reads the states that a checkpoint has in its files `optimizer*.safetensors`, in whatever formats, into this run's. The
    /// weights that were saved with them must be there already.
    ///
    /// # Errors
    /// [`SessionError::OptimizerState`] if a file is torn, or of another model.
    pub fn import_optimizer(&mut self, folder: &Path) -> Result<(), SessionError> {
        let tensors = TensorFiles::open_folder(folder, "optimizer");
        let tensors = tensors.map_err(OptimizerStateError::Files)?;
        let find = |name: &str| tensors.get(name).and_then(saved);
        for index in 0..self.model().layout().entries().len() {
            let (kernels, parameters) = (&*self.kernels, &mut self.weights);
            let restored = self.optimizer.restore(kernels, parameters, index, &find);
            restored.map_err(|source| OptimizerStateError::Restore {
                path: folder.into(),
                source,
            })?;
        }
        Ok(())
    }
}

/// A tensor, if its type is known. Whether states have it is for the optimizer to say.
fn saved(tensor: Tensor<'_>) -> Option<SavedState<'_>> {
    Some(SavedState {
        dtype: DType::try_from(tensor.dtype).ok()?,
        bytes: tensor.bytes,
    })
}
