//! Weights into a session and out of it.

use crate::failure::Failure;
use crate::session::Session;
use kernels::KernelError;
use memory::{Arena, DType};
use model::{WeightsError, encode, export, import, initialise};
use optim::download_f32;
use std::cell::Cell;
use std::path::Path;

/// Removes a file during whose writing the device failed, which that is the first to tell.
///
/// # Errors
/// [`Failure::Device`] if it did.
pub(crate) fn whole_or_gone(path: &Path, failed: Option<KernelError>) -> Result<(), Failure> {
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
    /// [`Failure::Device`] if the device fails.
    pub fn set_values(&mut self, offset: usize, values: &[f32]) -> Result<(), Failure> {
        let parameters = &mut self.parameters;
        self.optimizer
            .set_weights(&*self.kernels, parameters, offset, values)?;
        Ok(())
    }

    /// Fills the model with fresh weights.
    ///
    /// # Errors
    /// [`Failure::Device`] if the device fails.
    pub fn initialise(&mut self, seed: u64) -> Result<(), Failure> {
        let (config, layout) = (self.model.config().clone(), self.model.layout().clone());
        initialise(&config, &layout, seed, |offset, values| {
            self.set_values(offset, values)
        })
    }

    /// Fills the model from a folder in Hugging Face layout.
    ///
    /// # Errors
    /// [`Failure::Weights`] if a tensor is missing or has another shape.
    pub fn import(&mut self, folder: &Path) -> Result<(), Failure> {
        let layout = self.model.layout().clone();
        import(folder, &layout, |offset, values| {
            self.set_values(offset, values)
        })
    }

    /// Writes the model to a folder in Hugging Face layout: `config.json` and `model.safetensors`.
    ///
    /// # Errors
    /// [`Failure::File`] or [`Failure::Weights`].
    pub fn export(&self, folder: &Path) -> Result<(), Failure> {
        std::fs::create_dir_all(folder).map_err(Failure::file(folder))?;
        let name = if self.parameters.dtype() == DType::BF16 {
            "bfloat16"
        } else {
            "float32"
        };
        let config = folder.join("config.json");
        let text = self.model.config().to_hf(self.settings.seq, name);
        std::fs::write(&config, text).map_err(Failure::file(config))?;
        let path = folder.join("model.safetensors");
        self.export_arena(&path, &self.parameters, self.parameters.dtype())
    }

    /// Writes the gradients of the last step, before clipping, as f32 under Hugging Face names.
    ///
    /// # Errors
    /// [`Failure::File`] or [`Failure::Weights`].
    pub fn export_gradients(&self, path: &Path) -> Result<(), Failure> {
        self.export_arena(path, self.gradients.arena(), DType::F32)
    }

    fn export_arena(&self, path: &Path, arena: &Arena, dtype: DType) -> Result<(), Failure> {
        let failed = Cell::new(None);
        let written = export(path, arena.layout(), dtype, |index| {
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
    /// [`Failure::Device`] if the device fails.
    pub fn parameter(&self, index: usize) -> Result<Vec<f32>, Failure> {
        Ok(download_f32(&*self.kernels, self.parameters.view(index))?)
    }
}
