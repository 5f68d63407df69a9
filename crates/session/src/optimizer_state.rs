//! Reads optimizer states from a checkpoint's files. A run with other formats can read them too: they are converted
//! through f32.

use crate::Result;
use crate::error::OptimizerStateError;
use crate::session::Session;
use files::Tensors;
use memory::DType;
use optim::SavedState;
use std::path::Path;

impl Session {
    /// Reads the states in a checkpoint's files `optimizer*.safetensors`, or in those of its ranks, in any formats, and
    /// takes what this rank keeps. The weights that were saved with them must already be loaded.
    ///
    /// # Errors
    /// [`SessionError::OptimizerState`](crate::SessionError::OptimizerState) if a file is damaged, or belongs to another model.
    pub fn import_optimizer(&mut self, folder: &Path) -> Result {
        let tensors = Tensors::open_folder(folder, "optimizer");
        let tensors = tensors.map_err(OptimizerStateError::Files)?;
        // A tensor, if its type is known. The optimizer decides whether it belongs to a state.
        let find = |name: &str| {
            let tensor = tensors.get(name)?;
            Some(SavedState {
                dtype: DType::try_from(tensor.dtype).ok()?,
                bytes: tensor.bytes,
            })
        };
        let layout = self.model().layout().clone();
        let entries = layout.entries().iter().enumerate();
        for (index, _) in entries.filter(|(_, entry)| entry.role.is_trained()) {
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
