//! Loads and exports a session's weights.

use crate::Result;
use crate::error::SessionError;
use crate::incoming::IncomingWeights;
use crate::read_back::widened;
use crate::session::Session;
use crate::snapshot::saved_parameters;
use files::{Disk, TensorSource, host_room, narrow, writing_order};
use kernels::Kernels;
use memory::{DType, Layer, Layout, Memory, Phase};
use model::{
    Fresh, MAX_SHARD_BYTES, OutgoingWeights, Parameters, WeightsError, WholeModel, file_specs,
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

    /// Initialises the weights, with the settings' standard deviation.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn initialise(&mut self, seed: u64) -> Result {
        let deviation = self.settings.model.init_std;
        self.incoming().initialise(Fresh { deviation, seed })
    }

    /// Writes the model to a folder in Hugging Face layout, with these files of a text model, as part of `whole` if there is one. Of a model with
    /// adapters those alone are written, as PEFT writes them. All ranks call this, and the first one writes.
    ///
    /// # Errors
    /// [`SessionError::File`] or [`SessionError::Weights`].
    pub fn export(
        &mut self,
        folder: &Path,
        files: &[(String, Vec<u8>)],
        whole: Option<&WholeModel>,
    ) -> Result {
        let all = &self.model.architecture().parameters;
        let (parameters, indices) = saved_parameters(&self.settings, all);
        let dtype = self.weights.dtype();
        let has_adapters = self.settings.lora.is_some();
        let ranks = self.settings.ranks.as_ref();
        let is_first = ranks.is_none_or(|ranks| ranks.rank.number == 0);
        let reader = RefCell::new(Reader::begin(self, (&parameters, &indices)));
        let written = match is_first {
            true => {
                let made = std::fs::create_dir_all(folder).map_err(|source| SessionError::File {
                    path: folder.into(),
                    source,
                });
                let bytes =
                    |index: usize, elements| reader.borrow_mut().bytes(indices[index], elements);
                made.and_then(|()| {
                    // What is written behind the text part leaves the order in which ranks gather it.
                    write_chunks(&parameters, bytes, dtype, |weights| match whole {
                        _ if has_adapters => write_adapter(&Disk, folder, files, weights),
                        None => write_model(&Disk, folder, files, weights, MAX_SHARD_BYTES),
                        Some(whole) => {
                            let (all, files) =
                                (whole.with_text(weights), whole.files(files.to_vec()));
                            write_model(&Disk, folder, &files, &all, MAX_SHARD_BYTES)
                        }
                    })
                })
            }
            false => Ok(()),
        };
        // If this rank's disk is full, the others must not wait for it, and that error is the one to report.
        let ended = reader.into_inner().end();
        written.and(ended)
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
    /// The units that are still to be gathered, in the order of a model's files, which is the same on all ranks.
    units: std::vec::IntoIter<usize>,
    current: Option<usize>,
}

impl<'a> Reader<'a> {
    /// Reads some parameters, whose indices in the layout are given.
    fn begin(
        session: &'a mut Session,
        (parameters, indices): (&Parameters, &[usize]),
    ) -> Reader<'a> {
        let Session {
            memory,
            kernels,
            weights,
            ..
        } = session;
        let gathers = weights.held().elements() < weights.layout().elements();
        let mut units = Vec::new();
        if gathers {
            let files = file_specs(parameters, weights.dtype());
            let sources = sources_of_files(parameters);
            let order = writing_order(&files, MAX_SHARD_BYTES).into_iter();
            let layout = weights.layout();
            units.extend(order.filter_map(|tensor| {
                let (parameter, first) = sources[tensor];
                unit_of(layout, layout.entries()[indices[parameter]].offset + first)
            }));
            units.dedup();
            weights.begin_pass(&units.clone().into());
        }
        Reader {
            memory,
            kernels: &**kernels,
            weights,
            gathers,
            units: units.into_iter(),
            current: None,
        }
    }

    /// Some elements of a parameter, whose unit is the current one or comes later in the order.
    fn bytes(&mut self, index: usize, elements: Range<usize>) -> Result<Vec<u8>> {
        let layout = self.weights.layout();
        let first = layout.entries()[index].offset;
        let range = first + elements.start..first + elements.end;
        let unit = self.gathers.then(|| unit_of(layout, range.start)).flatten();
        while unit.is_some() && self.current != unit {
            assert!(self.gather_next()?, "units are read in the order of files");
        }
        let bytes = host_room(range.len() * self.weights.dtype_of(&range).size_in_bytes());
        let mut bytes = bytes.map_err(WeightsError::Write)?;
        match unit {
            Some(_) => self.kernels.download(&mut bytes, self.weights.flat(range)),
            None => self.weights.read(self.kernels, range, &mut bytes),
        }?;
        Ok(bytes)
    }

    /// Gathers the next unit, and begins the one after it. Returns whether there was one.
    fn gather_next(&mut self) -> Result<bool> {
        self.current = self.units.next();
        if let Some(unit) = self.current {
            let _place = self.memory.enter(Phase::Checkpoint, Layer::Whole);
            self.weights.use_unit(self.kernels, unit)?;
            self.weights.look_ahead(self.kernels)?;
        }
        Ok(self.current.is_some())
    }

    /// Gathers what has not been gathered yet, because other ranks wait for it.
    fn end(mut self) -> Result {
        while self.gather_next()? {}
        match self.gathers {
            true => Ok(self.weights.end_pass(self.kernels)?),
            false => Ok(()),
        }
    }
}

/// The unit of an element of the layout, if it is in one.
fn unit_of(layout: &Layout, element: usize) -> Option<usize> {
    layout.locate(&(element..element + 1))
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
