//! Weights into a session and out of it.

use crate::error::SessionError;
use crate::session::Session;
use kernels::KernelError;
use memory::{Arena, DType};
use model::{Fresh, WeightsError, encode, export, import, initialise};
use optim::download_f32;
use std::cell::Cell;
use std::path::Path;

/// Removes a file during whose writing the device failed, which that is the first to tell.
///
/// # Errors
/// [`SessionError::Kernel`] if it did.
pub(crate) fn whole_or_gone(path: &Path, failed: Option<KernelError>) -> Result<(), SessionError> {
    let Some(error) = failed else {
        return Ok(());
    };
    // The device's failure is the one to tell; a file that stays is half of one, as after any crash.
    let _ = std::fs::remove_file(path);
    Err(error.into())
}

impl Session {
    /// Sets values from an element of the arena on, and their masters where there are any.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn set_values(&mut self, offset: usize, values: &[f32]) -> Result<(), SessionError> {
        let parameters = &mut self.parameters;
        self.optimizer
            .set_weights(&*self.kernels, parameters, offset, values)?;
        Ok(())
    }

    /// Fills the model with fresh weights.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn initialise(&mut self, seed: u64) -> Result<(), SessionError> {
        let deviation = self.settings.model.init_std;
        let layout = self.model.layout().clone();
        let parameters = self.model.architecture().parameters().clone();
        let fresh = Fresh { deviation, seed };
        initialise(&parameters, &layout, fresh, |offset, values| {
            self.set_values(offset, values)
        })
    }

    /// Fills the model from a folder in Hugging Face layout.
    ///
    /// # Errors
    /// [`SessionError::Weights`] if a tensor is missing or has another shape.
    pub fn import(&mut self, folder: &Path) -> Result<(), SessionError> {
        let layout = self.model.layout().clone();
        let parameters = self.model.architecture().parameters().clone();
        import(folder, &parameters, &layout, |offset, values| {
            self.set_values(offset, values)
        })
    }

    /// Writes the model to a folder in Hugging Face layout: `config.json` and `model.safetensors`.
    ///
    /// # Errors
    /// [`SessionError::File`] or [`SessionError::Weights`].
    pub fn export(&self, folder: &Path) -> Result<(), SessionError> {
        std::fs::create_dir_all(folder).map_err(SessionError::file(folder))?;
        let name = if self.parameters.dtype() == DType::BF16 {
            "bfloat16"
        } else {
            "float32"
        };
        let config = folder.join("config.json");
        let text = self.settings.model.to_hf(self.settings.seq, name);
        std::fs::write(&config, text).map_err(SessionError::file(config))?;
        let path = folder.join("model.safetensors");
        self.export_arena(&path, &self.parameters, self.parameters.dtype())
    }

    /// Writes the gradients of the last step, before clipping, as f32 under Hugging Face names.
    ///
    /// # Errors
    /// [`SessionError::File`] or [`SessionError::Weights`].
    pub fn export_gradients(&self, path: &Path) -> Result<(), SessionError> {
        self.export_arena(path, self.gradients.arena(), DType::F32)
    }

    fn export_arena(&self, path: &Path, arena: &Arena, dtype: DType) -> Result<(), SessionError> {
        let failed = Cell::new(None);
        let parameters = self.model.architecture().parameters();
        let written = export(path, parameters, dtype, |index| {
            let view = arena.view(index);
            let values = download_f32(&*self.kernels, view).unwrap_or_else(|error| {
                failed.set(Some(error));
                vec![0.0; view.elements()]
            });
            encode(&values, dtype).into_owned()
        });
        whole_or_gone(path, failed.take())?;
        written.map_err(|error: WeightsError| error.into())
    }

    /// The values of one parameter, widened to f32.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn parameter(&self, index: usize) -> Result<Vec<f32>, SessionError> {
        Ok(download_f32(&*self.kernels, self.parameters.view(index))?)
    }
}
