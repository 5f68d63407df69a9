//! States by parameter and name, as checkpoints hold them.

use half::bf16;
use kernels::{KernelError, Kernels, Queue};
use memory::{DType, Entry, In, Space};

/// One state of one parameter, for saving.
pub struct NamedState<'a> {
    /// The parameter's name, a dot, and the state's: `first_moment`, `second_moment` (f32 or bf16), their `.codes` (u8)
    /// and `.absmax` (f32, one for each 256 values), `master` (f32), `remainder` (i16).
    pub name: String,
    /// The state itself, flat.
    pub view: In<'a>,
    /// Where it lives.
    pub space: Space,
}

impl NamedState<'_> {
    /// Copies the state.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or `bytes` have another size.
    pub fn read(&self, kernels: &dyn Kernels, bytes: &mut [u8]) -> Result<(), KernelError> {
        match self.space {
            Space::Device => kernels.download(bytes, self.view),
            Space::Host => {
                kernels.finish(kernels.record(Queue::Download)?)?;
                bytes.copy_from_slice(self.view.cast(DType::U8).slice::<u8>());
                Ok(())
            }
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

    /// `elements` of f32 or bf16, as f32.
    pub(crate) fn widened(&self, entry: &Entry, elements: usize) -> Result<Vec<f32>, RestoreError> {
        if self.dtype == DType::BF16 {
            let bytes = self.exactly(entry, elements, DType::BF16)?;
            let pairs = bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
            return Ok(pairs
                .map(|pair| bf16::from_le_bytes(pair).to_f32())
                .collect());
        }
        let bytes = self.exactly(entry, elements, DType::F32)?;
        let words = bytes.chunks_exact(4);
        Ok(words
            .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect())
    }
}

/// The name of a parameter's state.
pub(crate) fn state_name(entry: &Entry, kind: &str) -> String {
    format!("{}.{kind}", entry.name)
}
