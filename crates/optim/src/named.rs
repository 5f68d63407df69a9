//! States by parameter and name, as checkpoints hold them.

use crate::store::Store;
use files::{FilesError, Parts};
use half::bf16;
use kernels::{KernelError, Kernels};
use memory::{DType, Entry, In};
use std::borrow::Cow;
use std::ops::Range;

/// One state of a parameter, or of some of its elements, for saving.
pub struct NamedState<'a> {
    /// The parameter's name, a dot, and the state's: `first_moment`, `second_moment`, `momentum` (f32 or bf16), their `.codes`
    /// (u8) and `.absmax` (f32, one for each 256 values), `master` (f32), `remainder` (i16).
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Which elements of the parameter's state these are.
    pub elements: Range<usize>,
    /// How many elements the state has for the whole parameter.
    pub whole: usize,
    pub(crate) from: ReadFrom<'a>,
}

/// What a state is read from.
pub(crate) enum ReadFrom<'a> {
    /// On the device.
    Device(In<'a>),
    /// In pieces that lie in chunks.
    Chunks(&'a Store, Vec<Range<usize>>),
}

impl NamedState<'_> {
    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.elements.len() * self.dtype.size_in_bytes()
    }

    /// Copies the elements.
    ///
    /// # Errors
    /// [`KernelError`] if the device or a disk fails, or `bytes` have another size.
    pub fn read(&self, kernels: &Kernels, bytes: &mut [u8]) -> Result<(), KernelError> {
        match &self.from {
            ReadFrom::Device(view) => kernels.download(bytes, *view),
            ReadFrom::Chunks(store, pieces) => store.read(kernels, pieces, bytes),
        }
    }
}

/// A saved state, of a whole parameter.
#[derive(Clone)]
pub struct SavedState<'a> {
    /// Element type.
    pub dtype: DType,
    /// Little-endian elements.
    pub bytes: Parts<'a>,
}

/// A saved optimizer cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Something was not saved.
    #[error(
        "`{0}` was not saved: the file is of another model, or the parameter was frozen in the run that saved it (train.freeze) \
         or updated by another optimizer (optim.kind, optim.matrices); --init-from the exported model starts anew"
    )]
    Missing(String),
    /// Something has another size or type.
    #[error(
        "a state of `{name}` has {bytes} bytes of {dtype:?}; this model needs {elements} elements of {expected:?}"
    )]
    Misfit {
        /// The parameter.
        name: String,
        /// What was saved.
        bytes: usize,
        /// Its type.
        dtype: DType,
        /// What is needed.
        elements: usize,
        /// Its type.
        expected: DType,
    },
    /// A file cannot be read.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl RestoreError {
    pub(crate) fn missing(entry: &Entry, kind: &str) -> RestoreError {
        RestoreError::Missing(state_name(entry, kind))
    }
}

impl<'a> SavedState<'a> {
    /// The same, if it is `elements` of this type.
    pub(crate) fn exactly(
        self,
        entry: &Entry,
        elements: usize,
        dtype: DType,
    ) -> Result<SavedState<'a>, RestoreError> {
        if self.dtype == dtype && self.bytes.len() == elements * dtype.size_in_bytes() {
            return Ok(self);
        }
        Err(RestoreError::Misfit {
            name: entry.name.clone(),
            bytes: self.bytes.len(),
            dtype: self.dtype,
            elements,
            expected: dtype,
        })
    }

    /// The same, if it has so many elements of f32 or bf16.
    pub(crate) fn real(
        self,
        entry: &Entry,
        elements: usize,
    ) -> Result<SavedState<'a>, RestoreError> {
        let dtype = match self.dtype {
            DType::BF16 => DType::BF16,
            _ => DType::F32,
        };
        self.exactly(entry, elements, dtype)
    }

    /// The bytes of some elements.
    pub(crate) fn part(&self, elements: &Range<usize>) -> Result<Cow<'a, [u8]>, FilesError> {
        let size = self.dtype.size_in_bytes();
        self.bytes.get(elements.start * size..elements.end * size)
    }

    /// Some elements of f32 or bf16, as f32.
    pub(crate) fn widened(&self, elements: &Range<usize>) -> Result<Vec<f32>, FilesError> {
        let bytes = self.part(elements)?;
        if self.dtype == DType::BF16 {
            let halves = bytes.as_chunks().0.iter().copied().map(bf16::from_le_bytes);
            return Ok(halves.map(bf16::to_f32).collect());
        }
        let words = bytes.as_chunks().0.iter().copied();
        Ok(words.map(f32::from_le_bytes).collect())
    }
}

/// The name of a parameter's state.
pub(crate) fn state_name(entry: &Entry, kind: &str) -> String {
    format!("{}.{kind}", entry.name)
}
