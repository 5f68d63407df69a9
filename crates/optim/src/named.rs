//! States by parameter and name, as checkpoints hold them.

use crate::store::Store;
use half::bf16;
use kernels::{KernelError, Kernels};
use memory::{DType, Entry, In};
use std::ops::Range;

/// One state of one parameter, for saving.
pub struct NamedState<'a> {
    /// The parameter's name, a dot, and the state's: `first_moment`, `second_moment` (f32 or bf16), their `.codes` (u8)
    /// and `.absmax` (f32, one for each 256 values), `master` (f32), `remainder` (i16).
    pub name: String,
    /// Element type.
    pub dtype: DType,
    pub(crate) elements: usize,
    pub(crate) place: StatePlace<'a>,
}

/// Where a state lives.
pub(crate) enum StatePlace<'a> {
    /// On the device.
    Device(In<'a>),
    /// In pieces that lie in chunks.
    Chunks(&'a Store, Vec<Range<usize>>),
}

impl NamedState<'_> {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Copies the state.
    ///
    /// # Errors
    /// [`KernelError`] if the device or a disk fails, or `bytes` have another size.
    pub fn read(&self, kernels: &dyn Kernels, bytes: &mut [u8]) -> Result<(), KernelError> {
        match &self.place {
            StatePlace::Device(view) => kernels.download(bytes, *view),
            StatePlace::Chunks(store, pieces) => store.read(kernels, pieces, bytes),
        }
    }
}

/// A saved state.
#[derive(Clone, Copy)]
pub struct SavedState<'a> {
    /// Element type.
    pub dtype: DType,
    /// Little-endian elements.
    pub bytes: &'a [u8],
}

/// A saved optimizer cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Something was not saved.
    #[error("`{0}` was not saved; the file is no optimizer state of this model")]
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
    /// The bytes of `elements` of this type.
    pub(crate) fn exactly(
        &self,
        entry: &Entry,
        elements: usize,
        dtype: DType,
    ) -> Result<&'a [u8], RestoreError> {
        if self.dtype == dtype && self.bytes.len() == elements * dtype.size_in_bytes() {
            return Ok(self.bytes);
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
        self.exactly(entry, elements, dtype)?;
        Ok(self)
    }

    /// The bytes of some elements.
    pub(crate) fn part(&self, elements: &Range<usize>) -> &'a [u8] {
        let size = self.dtype.size_in_bytes();
        &self.bytes[elements.start * size..elements.end * size]
    }

    /// Some elements of f32 or bf16, as f32.
    pub(crate) fn widened(&self, elements: &Range<usize>) -> Vec<f32> {
        let bytes = self.part(elements);
        if self.dtype == DType::BF16 {
            let pairs = bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
            return pairs
                .map(|pair| bf16::from_le_bytes(pair).to_f32())
                .collect();
        }
        let words = bytes.chunks_exact(4);
        words
            .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect()
    }
}

/// The name of a parameter's state.
pub(crate) fn state_name(entry: &Entry, kind: &str) -> String {
    format!("{}.{kind}", entry.name)
}
