//! The optimizer's states into a file and out of it.
//!
//! A safetensors file with one tensor a state of a parameter, under the parameter's name and the state's
//! ([`optim::NamedState`]), bit by bit as the run keeps it. A run with other formats can read it: what is stored otherwise is
//! converted through f32.

use crate::error::{OptimizerStateError, SessionError};
use crate::session::Session;
use crate::weights::whole_or_gone;
use kernels::KernelError;
use memmap2::Mmap;
use memory::DType;
use optim::{NamedState, SavedState};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, View, serialize_to_file};
use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

/// The numbers of steps and updates, as metadata. One entry for both: safetensors writes entries in any order, and equal
/// states are equal files.
const PROGRESS: &str = "steps,updates";

impl Session {
    /// Writes all optimizer states, and how many steps and updates have been made.
    ///
    /// # Errors
    /// [`OptimizerStateError::Write`].
    pub fn export_optimizer(&self, path: &Path) -> Result<(), SessionError> {
        let entries = self.model().layout().entries().len();
        let failed = Cell::new(None);
        let states = (0..entries).flat_map(|index| self.optimizer.named_states(index));
        let tensors = states.map(|state| {
            let shape = [state.view.elements()];
            let (session, failed) = (self, &failed);
            (
                state.name.clone(),
                Lazy {
                    state,
                    shape,
                    session,
                    failed,
                },
            )
        });
        let (step, updates) = self.progress();
        let metadata = HashMap::from([(PROGRESS.to_string(), format!("{step},{updates}"))]);
        let written = serialize_to_file(tensors, Some(metadata), path);
        whole_or_gone(path, failed.take())?;
        Ok(written.map_err(|source| OptimizerStateError::Write {
            path: path.into(),
            source,
        })?)
    }

    /// Reads the states that [`Session::export_optimizer`] wrote, in whatever formats, into this run's. The weights
    /// that were saved with them must be there already.
    ///
    /// # Errors
    /// [`OptimizerStateError`] if the file is not one, or one of another model.
    pub fn import_optimizer(&mut self, path: &Path) -> Result<(), SessionError> {
        let open = |source| OptimizerStateError::Open {
            path: path.into(),
            source,
        };
        let not_one = |problem: String| OptimizerStateError::NotOne {
            path: path.into(),
            problem,
        };
        let file = File::open(path).map_err(open)?;
        // SAFETY: mapped for reading; whoever truncates the file meanwhile ends the process, as with any map.
        let bytes = unsafe { Mmap::map(&file) }.map_err(open)?;
        let broken = |error: safetensors::SafeTensorError| not_one(error.to_string());
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(broken)?;
        let text = header.metadata().as_ref().and_then(|all| all.get(PROGRESS));
        let numbers = text.and_then(|text| text.split_once(','));
        let numbers =
            numbers.and_then(|(steps, updates)| Some((steps.parse().ok()?, updates.parse().ok()?)));
        let no_numbers = || not_one(format!("its metadata has no two numbers `{PROGRESS}`"));
        let progress = numbers.ok_or_else(no_numbers)?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(broken)?;
        let find = |name: &str| tensors.tensor(name).ok().and_then(saved);
        for index in 0..self.model().layout().entries().len() {
            let (kernels, parameters) = (&*self.kernels, &mut self.parameters);
            let restored = self.optimizer.restore(kernels, parameters, index, &find);
            restored.map_err(|source| OptimizerStateError::Restore {
                path: path.into(),
                source,
            })?;
        }
        self.set_progress(progress);
        Ok(())
    }
}

/// A state whose bytes are fetched when they are written.
struct Lazy<'a> {
    state: NamedState<'a>,
    shape: [usize; 1],
    session: &'a Session,
    failed: &'a Cell<Option<KernelError>>,
}

impl View for Lazy<'_> {
    fn dtype(&self) -> Dtype {
        match self.state.view.dtype() {
            DType::U8 => Dtype::U8,
            DType::I16 => Dtype::I16,
            DType::BF16 => Dtype::BF16,
            _ => Dtype::F32,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = vec![0; self.data_len()];
        if let Err(error) = self.state.read(&*self.session.kernels, &mut bytes) {
            self.failed.set(Some(error));
        }
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.shape[0] * self.state.view.dtype().size_in_bytes()
    }
}

/// A tensor of a type that states have.
fn saved(tensor: TensorView<'_>) -> Option<SavedState<'_>> {
    let dtype = match tensor.dtype() {
        Dtype::U8 => DType::U8,
        Dtype::I16 => DType::I16,
        Dtype::BF16 => DType::BF16,
        Dtype::F32 => DType::F32,
        _ => return None,
    };
    let bytes = tensor.data();
    Some(SavedState { dtype, bytes })
}
