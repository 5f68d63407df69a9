//! Weights into a session and out of it.

use crate::failure::Failure;
use crate::session::Session;
use half::bf16;
use memory::{Arena, DType};
use model::{WeightsError, encode, export, import, initialise};
use std::path::Path;

impl Session {
    /// Sets values from an element of the arena on, and their masters where there are any.
    ///
    /// # Errors
    /// [`Failure::Device`] if the device fails.
    pub fn set_values(&mut self, offset: usize, values: &[f32]) -> Result<(), Failure> {
        let (range, dtype) = (offset..offset + values.len(), self.parameters.dtype());
        let parameters = self.parameters.flat_mut(range.clone());
        self.kernels.upload(parameters, &encode(values, dtype))?;
        if let Some(master) = self.optimizer.master_mut() {
            self.kernels
                .upload(master.flat_mut(range), bytemuck::cast_slice(values))?;
        }
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
        self.export_arena(&folder.join("model.safetensors"), &self.parameters)
    }

    /// Writes the gradients of the last step, before clipping, as f32 under Hugging Face names.
    ///
    /// # Errors
    /// [`Failure::File`] or [`Failure::Weights`].
    pub fn export_gradients(&self, path: &Path) -> Result<(), Failure> {
        self.export_arena(path, self.gradients.arena())
    }

    fn export_arena(&self, path: &Path, arena: &Arena) -> Result<(), Failure> {
        let written = export(path, arena.layout(), arena.dtype(), |index| {
            let view = arena.view(index);
            let mut bytes = vec![0; view.elements() * view.dtype().size_in_bytes()];
            self.kernels
                .download(&mut bytes, view)
                .expect("an entry of an arena is contiguous, and `bytes` fits it");
            bytes
        });
        written.map_err(|error: WeightsError| error.into())
    }

    /// The values of one parameter, widened to f32.
    ///
    /// # Errors
    /// [`Failure::Device`] if the device fails.
    pub fn parameter(&self, index: usize) -> Result<Vec<f32>, Failure> {
        let view = self.parameters.view(index);
        let elements = view.elements();
        if view.dtype() == DType::BF16 {
            let mut values = vec![bf16::ZERO; elements];
            self.kernels
                .download(bytemuck::cast_slice_mut(&mut values), view)?;
            return Ok(values.into_iter().map(f32::from).collect());
        }
        let mut values = vec![0f32; elements];
        self.kernels
            .download(bytemuck::cast_slice_mut(&mut values), view)?;
        Ok(values)
    }
}
