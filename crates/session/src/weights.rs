//! Weights into a session and out of it.

use crate::error::SessionError;
use crate::session::Session;
use files::{Disk, TensorSource, write_tensors};
use half::bf16;
use kernels::KernelError;
use memory::DType;
use model::{
    Fresh, MAX_SHARD_BYTES, Origin, OutgoingWeights, WeightsError, encode, import, initialise,
    write_model,
};
use std::cell::Cell;
use std::io;
use std::path::Path;

impl Session {
    /// Sets values from an element of the arena on, and their masters where there are any.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn set_values(&mut self, offset: usize, values: &[f32]) -> Result<(), SessionError> {
        let weights = &mut self.weights;
        self.optimizer
            .set_weights(&*self.kernels, weights, offset, values)?;
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

    /// Writes the model to a folder in Hugging Face layout, with all that came with it.
    ///
    /// # Errors
    /// [`SessionError::File`] or [`SessionError::Weights`].
    pub fn export(&self, folder: &Path, origin: &Origin) -> Result<(), SessionError> {
        std::fs::create_dir_all(folder).map_err(SessionError::file(folder))?;
        let (settings, dtype) = (&self.settings, self.weights.dtype());
        let files = origin.files(&settings.model, settings.seq, dtype);
        self.write_tensors(
            |index| self.parameter(index),
            dtype,
            |weights| write_model(&Disk, folder, &files, weights, MAX_SHARD_BYTES),
        )
    }

    /// Writes the gradients of the last step, before clipping, as f32 under Hugging Face names, to a safetensors file.
    ///
    /// # Errors
    /// [`SessionError::File`] or [`SessionError::Weights`].
    pub fn export_gradients(&self, path: &Path) -> Result<(), SessionError> {
        let folder = path.parent().unwrap_or(Path::new(""));
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        self.write_tensors(
            |index| self.gradient(index),
            DType::F32,
            |gradients| {
                let one_file = u64::MAX;
                write_tensors(&Disk, folder, &stem, gradients, one_file)
                    .map_err(WeightsError::Write)
                    .map(|_| ())
            },
        )
    }

    /// Hands tensors to `write`, which asks for one after the other.
    fn write_tensors(
        &self,
        values: impl Fn(usize) -> Result<Vec<f32>, SessionError>,
        dtype: DType,
        write: impl FnOnce(&dyn TensorSource) -> Result<(), WeightsError>,
    ) -> Result<(), SessionError> {
        let failed = Cell::new(None);
        let parameters = self.model.architecture().parameters();
        let weights = OutgoingWeights::new(parameters, dtype, |index| {
            let values = values(index).map_err(|error| {
                let reason = io::Error::other(error.to_string());
                failed.set(Some(error));
                reason
            })?;
            Ok(encode(&values, dtype).into_owned().into())
        });
        let written = write(&weights);
        match failed.take() {
            Some(error) => Err(error),
            None => Ok(written?),
        }
    }

    /// The values of one parameter, widened to f32.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn parameter(&self, index: usize) -> Result<Vec<f32>, SessionError> {
        let range = self.weights.layout().entries()[index].range();
        let (dtype, elements) = (self.weights.dtype(), range.len());
        Ok(widened(dtype, elements, |bytes| {
            self.weights.read(&*self.kernels, range, bytes)
        })?)
    }
}

/// Elements of a type that `read` copies, as f32.
pub(crate) fn widened(
    dtype: DType,
    elements: usize,
    read: impl FnOnce(&mut [u8]) -> Result<(), KernelError>,
) -> Result<Vec<f32>, KernelError> {
    if dtype == DType::F32 {
        let mut values = vec![0.0; elements];
        read(bytemuck::cast_slice_mut(&mut values))?;
        return Ok(values);
    }
    let mut halves = vec![bf16::ZERO; elements];
    read(bytemuck::cast_slice_mut(&mut halves))?;
    Ok(halves.into_iter().map(bf16::to_f32).collect())
}
