//! The state of a session for a checkpoint.

use crate::Result;
use crate::session::Session;
use crate::snapshot::{SessionState, StateOnDevice, StateOnHost, several};
use files::{PieceSource, TensorSource, piece_file_bytes, tensor_file_bytes};
use model::MAX_SHARD_BYTES;

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

    fn on_device(&self) -> StateOnDevice<'_> {
        StateOnDevice {
            kernels: &*self.kernels,
            weights: &self.weights,
            optimizer: &self.optimizer,
        }
    }
}
