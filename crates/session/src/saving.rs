//! The state of a session to a checkpoint, and optimizer states from one. A run with other formats can read them too: they are converted
//! through f32.

use crate::Result;
use crate::error::OptimizerStateError;
use crate::session::Session;
use crate::snapshot::{SessionState, StateOnDevice, StateOnHost, several};
use files::{PieceSource, TensorSource, Tensors, piece_file_bytes, tensor_file_bytes};
use memory::DType;
use model::MAX_SHARD_BYTES;
use optim::SavedState;
use std::path::Path;

/// Bytes of the tensor files that a session saves, without the small files beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedBytes {
    /// Bytes of a checkpoint; with several ranks, of this rank's file.
    pub checkpoint: u64,
    /// Bytes of the model in Hugging Face layout, which the first rank writes.
    pub model: u64,
}

impl Session {
    /// The current state. No update may be pending: see [`Session::finish_step`].
    pub fn state(&self) -> SessionState<'_> {
        let parameters = &self.model.architecture().parameters;
        self.on_device().state(&self.settings, parameters)
    }

    /// Copies the state to host memory, if the settings reserve it; else none. Waits until the previous copy is
    /// dropped, so the thread that holds that copy must not call this. No update may be pending.
    ///
    /// # Errors
    /// [`SessionError::Kernel`](crate::SessionError::Kernel) if the device failed.
    pub fn copy_state(&mut self) -> Result<Option<StateOnHost>> {
        let Some(mut place) = self.copy_place.take() else {
            return Ok(None);
        };
        let copy = place.fill(self.on_device());
        self.copy_place = Some(place);
        Ok(Some(copy?))
    }

    /// Sizes of the files that saving this session writes. No update may be pending: see [`Session::finish_step`].
    pub fn saved_bytes(&self) -> SavedBytes {
        let state = self.state();
        let whole = |source: &dyn TensorSource, stem| {
            tensor_file_bytes(source.tensors(), stem, MAX_SHARD_BYTES)
        };
        let model = whole(&state.weights(), "model");
        SavedBytes {
            checkpoint: match several(&self.settings) {
                Some(_) => piece_file_bytes(state.pieces()),
                None => model + whole(&state.optimizer(), "optimizer"),
            },
            model,
        }
    }

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

    fn on_device(&self) -> StateOnDevice<'_> {
        StateOnDevice {
            kernels: &*self.kernels,
            weights: &self.weights,
            optimizer: &self.optimizer,
        }
    }
}
