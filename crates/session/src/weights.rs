//! Weights into a session and out of it.

use crate::error::SessionError;
use crate::session::Session;
use files::{Disk, TensorSource};
use half::bf16;
use kernels::{KernelError, Kernels};
use memory::{DType, Layer, Memory, Phase};
use model::{
    Fresh, MAX_SHARD_BYTES, Origin, OutgoingWeights, Parameters, WeightsError, encode, import,
    initialise, write_model,
};
use std::cell::{Cell, RefCell};
use std::io;
use std::path::Path;
use units::Weights;

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
        let held = self.weights.held();
        import(folder, &parameters, &layout, &held, |offset, values| {
            self.set_values(offset, values)
        })
    }

    /// Writes the model to a folder in Hugging Face layout, with all that came with it. Several ranks all call this, and the
    /// first one writes.
    ///
    /// # Errors
    /// [`SessionError::File`] or [`SessionError::Weights`].
    pub fn export(&mut self, folder: &Path, origin: &Origin) -> Result<(), SessionError> {
        let ranks = self.settings.ranks.as_ref();
        if ranks.is_some_and(|ranks| ranks.rank > 0) {
            return match self.gathers() {
                true => self.each_parameter(|_, _| Ok(())),
                false => Ok(()),
            };
        }
        let (settings, dtype) = (&self.settings, self.weights.dtype());
        let files = origin.files(&settings.model, settings.seq, dtype);
        let parameters = self.model.architecture().parameters().clone();
        let reader = RefCell::new(Reader::begin(self));
        // All have one type, so that they are asked for in their order.
        let values = |index| reader.borrow_mut().values(index);
        let made = std::fs::create_dir_all(folder).map_err(SessionError::file(folder));
        let written = made.and_then(|()| {
            write_tensors(&parameters, values, dtype, |weights| {
                write_model(&Disk, folder, &files, weights, MAX_SHARD_BYTES)
            })
        });
        let mut reader = reader.into_inner();
        if reader.gathers && written.is_err() {
            // A full disk of this rank is no reason for the others to wait for it, and the one to tell.
            let _ = reader.rest(parameters.in_layout().count());
            return written;
        }
        reader.end()?;
        written
    }

    /// Hands over all parameters, widened to f32, in the order of the layout. What other ranks have of them is gathered: all
    /// call this.
    ///
    /// # Errors
    /// [`SessionError`] if the device fails or a lease is refused, or what `each` returns.
    pub fn each_parameter(
        &mut self,
        mut each: impl FnMut(usize, Vec<f32>) -> Result<(), SessionError>,
    ) -> Result<(), SessionError> {
        let count = self.model.layout().entries().len();
        let mut reader = Reader::begin(self);
        for index in 0..count {
            each(index, reader.values(index)?)?;
        }
        reader.end()
    }

    /// Whether other ranks have weights that this one has not.
    fn gathers(&self) -> bool {
        let layout = self.weights.layout();
        self.weights.held().elements() < layout.elements()
    }

    /// Writes the gradients of the last step, before clipping, as f32 under Hugging Face names, to a safetensors file.
    ///
    /// # Errors
    /// [`SessionError::File`] or [`SessionError::Weights`].
    pub fn export_gradients(&self, path: &Path) -> Result<(), SessionError> {
        let folder = path.parent().unwrap_or(Path::new(""));
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let parameters = self.model.architecture().parameters();
        let values = |index| self.gradient(index);
        write_tensors(parameters, values, DType::F32, |gradients| {
            let one_file = u64::MAX;
            let written = files::write_tensors(&Disk, folder, &stem, gradients, one_file);
            written.map_err(WeightsError::Write).map(|_| ())
        })
    }

    /// The values of one parameter, widened to f32, where no other rank has a part of it ([`Session::each_parameter`]).
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

/// Reads parameters one after the other, as a pass that uses their units.
struct Reader<'a> {
    memory: &'a Memory,
    kernels: &'a dyn Kernels,
    weights: &'a mut Weights,
    /// Whether units are gathered from ranks; else all is here.
    gathers: bool,
    /// How many parameters have been read.
    read: usize,
}

impl<'a> Reader<'a> {
    fn begin(session: &'a mut Session) -> Reader<'a> {
        let gathers = session.gathers();
        if gathers {
            let units = session.weights.layout().units().len();
            session.weights.begin_pass(&(0..units).collect());
        }
        Reader {
            memory: &session.memory,
            kernels: &*session.kernels,
            weights: &mut session.weights,
            gathers,
            read: 0,
        }
    }

    /// Reads those of so many parameters that have not been read.
    fn rest(&mut self, count: usize) -> Result<(), SessionError> {
        for index in self.read..count {
            self.values(index)?;
        }
        Ok(())
    }

    fn values(&mut self, index: usize) -> Result<Vec<f32>, SessionError> {
        let (layout, dtype) = (self.weights.layout().clone(), self.weights.dtype());
        let range = layout.entries()[index].range();
        let elements = range.len();
        self.read = index + 1;
        let Some(unit) = layout.unit_of(index).filter(|_| self.gathers) else {
            let read = |bytes: &mut [u8]| self.weights.read(self.kernels, range, bytes);
            return Ok(widened(dtype, elements, read)?);
        };
        let _place = self.memory.enter(Phase::Checkpoint, Layer::Whole);
        self.weights.use_unit(self.memory, self.kernels, unit)?;
        let read = |bytes: &mut [u8]| self.kernels.download(bytes, self.weights.flat(range));
        let values = widened(dtype, elements, read)?;
        self.weights.look_ahead(self.memory, self.kernels)?;
        Ok(values)
    }

    fn end(self) -> Result<(), SessionError> {
        match self.gathers {
            true => Ok(self.weights.end_pass(self.kernels)?),
            false => Ok(()),
        }
    }
}

/// Hands tensors to `write`, which asks for one after the other.
fn write_tensors(
    parameters: &Parameters,
    values: impl Fn(usize) -> Result<Vec<f32>, SessionError>,
    dtype: DType,
    write: impl FnOnce(&dyn TensorSource) -> Result<(), WeightsError>,
) -> Result<(), SessionError> {
    let failed = Cell::new(None);
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
