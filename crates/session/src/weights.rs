//! Loads and exports a session's weights.

use crate::Result;
use crate::error::SessionError;
use crate::incoming::IncomingWeights;
use crate::read_back::widened;
use crate::session::Session;
use files::{Disk, TensorSource, host_room, narrow, writing_order};
use kernels::Kernels;
use memory::{DType, Layer, Layout, Memory, Phase};
use model::{
    Fresh, Lora, MAX_SHARD_BYTES, OutgoingWeights, Parameters, WeightsError, file_specs,
    sources_of_files, write_adapter, write_model,
};
use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::path::Path;
use units::Weights;

impl Session {
    /// What fills the weights, and their masters if there are any.
    pub fn incoming(&mut self) -> IncomingWeights<'_> {
        IncomingWeights {
            model: &self.model,
            kernels: &*self.kernels,
            weights: &mut self.weights,
            optimizer: Some(&mut self.optimizer),
        }
    }

    /// As [`IncomingWeights::set_values`].
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn set_values(&mut self, offset: usize, values: &[f32]) -> Result {
        self.incoming().set_values(offset, values)
    }

    /// Initialises the weights, with the settings' standard deviation.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn initialise(&mut self, seed: u64) -> Result {
        let deviation = self.settings.model.init_std;
        self.incoming().initialise(Fresh { deviation, seed })
    }

    /// Initialises the factors of adapters.
    ///
    /// # Errors
    /// As [`Session::initialise`].
    pub fn initialise_factors(&mut self, seed: u64) -> Result {
        let deviation = self.settings.model.init_std;
        self.incoming()
            .initialise_factors(Fresh { deviation, seed })
    }

    /// The adapters, if the model has some.
    pub fn adapters(&self) -> Option<&Lora> {
        self.settings.lora.as_ref()
    }

    /// Writes the model to a folder in Hugging Face layout, with these files. Of a model with adapters those alone are
    /// written, as PEFT writes them. All ranks call this, and the first one writes.
    ///
    /// # Errors
    /// [`SessionError::File`] or [`SessionError::Weights`].
    pub fn export(&mut self, folder: &Path, files: &[(String, Vec<u8>)]) -> Result {
        let (parameters, indices) = self.exported();
        let dtype = self.weights.dtype();
        let has_adapters = self.settings.lora.is_some();
        let ranks = self.settings.ranks.as_ref();
        if ranks.is_some_and(|ranks| ranks.rank.number > 0) {
            let mut reader = Reader::begin(self);
            reader.rest()?;
            return reader.end();
        }
        let reader = RefCell::new(Reader::begin(self));
        let bytes = |index: usize, elements| reader.borrow_mut().bytes(indices[index], elements);
        let made = std::fs::create_dir_all(folder).map_err(SessionError::file(folder));
        let written = made.and_then(|()| {
            write_chunks(&parameters, bytes, dtype, |weights| match has_adapters {
                true => write_adapter(&Disk, folder, files, weights),
                false => write_model(&Disk, folder, files, weights, MAX_SHARD_BYTES),
            })
        });
        let mut reader = reader.into_inner();
        if reader.gathers && written.is_err() {
            // If this rank's disk is full, the others must not wait for it, and that error is the one to report.
            let _ = reader.rest();
            return written;
        }
        reader.end()?;
        written
    }

    /// The parameters that are written, and their indices in the layout: of a model with adapters those alone.
    fn exported(&self) -> (Parameters, Vec<usize>) {
        let parameters = &self.model.architecture().parameters;
        let all = parameters.in_layout().enumerate();
        match self.settings.lora {
            None => (parameters.clone(), all.map(|(index, _)| index).collect()),
            Some(_) => {
                let factors = all.filter(|(_, one)| one.is_factor);
                (
                    parameters.factors(),
                    factors.map(|(index, _)| index).collect(),
                )
            }
        }
    }

    /// Whether other ranks have weights that this one does not have.
    fn gathers(&self) -> bool {
        let layout = self.weights.layout();
        self.weights.held().elements() < layout.elements()
    }

    /// Writes the gradients of the last step before clipping, as f32 under Hugging Face names, to a safetensors file.
    /// Frozen parameters are left out.
    ///
    /// # Errors
    /// [`SessionError::File`] or [`SessionError::Weights`].
    pub fn export_gradients(&self, path: &Path) -> Result {
        let folder = path.parent().unwrap_or(Path::new(""));
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let parameters = self.model.architecture().parameters.trained();
        let entries = self.weights.layout().entries().iter().enumerate();
        let trained = entries.filter(|(_, entry)| entry.role.is_trained());
        let trained: Vec<usize> = trained.map(|(index, _)| index).collect();
        let bytes = |index: usize, elements| {
            let values = self.gradient_of(trained[index], elements)?;
            Ok(narrow(&values, DType::F32.into()).into_owned())
        };
        write_chunks(&parameters, bytes, DType::F32, |gradients| {
            let one_file = u64::MAX;
            let written = files::write_tensors(&Disk, folder, &stem, gradients, one_file);
            written.map_err(WeightsError::Write).map(|_| ())
        })
    }

    /// The values of one parameter, widened to f32. No other rank may have a part of it.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn parameter(&self, index: usize) -> Result<Vec<f32>> {
        let range = self.weights.layout().entries()[index].range();
        let (dtype, elements) = (self.weights.dtype_of(&range), range.len());
        Ok(widened(dtype, elements, |bytes| {
            self.weights.read(&*self.kernels, range, bytes)
        })?)
    }
}

/// Reads parameters one after the other, using their units as a pass does. Weights of other ranks are gathered, so all
/// ranks must read the same parameters.
struct Reader<'a> {
    memory: &'a Memory,
    kernels: &'a Kernels,
    weights: &'a mut Weights,
    /// Whether units are gathered from ranks. Otherwise this rank has everything.
    gathers: bool,
    /// The parameters in the order of a model's files, which is the same on all ranks, each with the unit that is gathered for it, if any.
    /// Parameters in groups come once for each group.
    order: Vec<(usize, Option<usize>)>,
    /// How many of these were read, the current one included.
    read: usize,
}

impl<'a> Reader<'a> {
    fn begin(session: &'a mut Session) -> Reader<'a> {
        let gathers = session.gathers();
        let (parameters, indices) = session.exported();
        let files = file_specs(&parameters, session.weights.dtype());
        let sources = sources_of_files(&parameters);
        let layout = session.weights.layout().clone();
        let order = writing_order(&files, MAX_SHARD_BYTES).into_iter();
        let order = order.map(|tensor| {
            let (parameter, first) = sources[tensor];
            let index = indices[parameter];
            (index, unit_of(&layout, gathers, (index, first)))
        });
        let mut order: Vec<(usize, Option<usize>)> = order.collect();
        order.dedup();
        if gathers {
            let mut units: Vec<usize> = order.iter().filter_map(|(_, unit)| *unit).collect();
            units.dedup();
            session.weights.begin_pass(&units.into());
        }
        Reader {
            memory: &session.memory,
            kernels: &*session.kernels,
            weights: &mut session.weights,
            gathers,
            order,
            read: 0,
        }
    }

    /// Gathers what has not been gathered yet, because other ranks wait for it.
    fn rest(&mut self) -> Result {
        while self.gathers && self.read < self.order.len() {
            self.turn_to_next()?;
        }
        Ok(())
    }

    /// Some elements of a parameter, which is the current one or comes later in the order.
    fn bytes(&mut self, index: usize, elements: Range<usize>) -> Result<Vec<u8>> {
        let layout = self.weights.layout().clone();
        let unit = unit_of(&layout, self.gathers, (index, elements.start));
        while self.current() != Some((index, unit)) {
            self.turn_to_next()?;
        }
        let first = self.weights.layout().entries()[index].offset;
        let range = first + elements.start..first + elements.end;
        let bytes = host_room(range.len() * self.weights.dtype_of(&range).size_in_bytes());
        let mut bytes = bytes.map_err(WeightsError::Write)?;
        match unit {
            Some(_) => self.kernels.download(&mut bytes, self.weights.flat(range)),
            None => self.weights.read(self.kernels, range, &mut bytes),
        }?;
        Ok(bytes)
    }

    fn current(&self) -> Option<(usize, Option<usize>)> {
        Some(self.order[self.read.checked_sub(1)?])
    }

    /// Moves to the next parameter, and gathers it.
    fn turn_to_next(&mut self) -> Result {
        self.finish_current()?;
        let (_, unit) = self.order[self.read];
        self.read += 1;
        if let Some(unit) = unit {
            let _place = self.memory.enter(Phase::Checkpoint, Layer::Whole);
            self.weights.use_unit(self.kernels, unit)?;
        }
        Ok(())
    }

    fn finish_current(&mut self) -> Result {
        if let Some((_, Some(_))) = self.current() {
            let _place = self.memory.enter(Phase::Checkpoint, Layer::Whole);
            self.weights.look_ahead(self.kernels)?;
        }
        Ok(())
    }

    fn end(mut self) -> Result {
        if self.gathers {
            self.finish_current()?;
            self.weights.end_pass(self.kernels)?;
        }
        Ok(())
    }
}

/// The unit that is gathered for some elements of a parameter, by the first, if units are.
fn unit_of(layout: &Layout, gathers: bool, (index, first): (usize, usize)) -> Option<usize> {
    let first = layout.entries()[index].offset + first;
    let unit = gathers.then(|| layout.locate(&(first..first + 1)));
    unit.flatten()
}

/// Passes tensors to `write` as a source that reads them in chunks.
fn write_chunks(
    parameters: &Parameters,
    bytes: impl Fn(usize, Range<usize>) -> Result<Vec<u8>>,
    dtype: DType,
    write: impl FnOnce(&dyn TensorSource) -> Result<(), WeightsError>,
) -> Result {
    let failed = Cell::new(None);
    let weights = OutgoingWeights::new(parameters, dtype, |index, elements| {
        let bytes = bytes(index, elements).map_err(|error| {
            let reason = io::Error::other(error.to_string());
            failed.set(Some(error));
            reason
        })?;
        Ok(bytes.into())
    });
    let written = write(&weights);
    match failed.take() {
        Some(error) => Err(error),
        None => Ok(written?),
    }
}
