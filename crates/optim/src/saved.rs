//! States by parameter and name, as a checkpoint holds them.

use files::{FilesError, Parts, widen};
use kernels::KernelError;
use memory::{DType, Entry};
use std::borrow::Cow;
use std::ops::Range;

/// A saved state, of a whole parameter.
#[derive(Clone)]
pub struct SavedState<'a> {
    /// Element type.
    pub dtype: DType,
    /// Little-endian elements.
    pub bytes: Parts<'a>,
}

/// The types of states that are numbers, and not codes or remainders.
pub(crate) const REAL: &[DType] = &[DType::F32, DType::BF16];

/// Returns a saved state of one parameter by the state's name.
pub(crate) type Find<'f, 'a> = &'f dyn Fn(&str) -> Option<SavedState<'a>>;

/// A saved optimizer cannot be restored.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
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
        name: String,
        bytes: usize,
        dtype: DType,
        elements: usize,
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
    /// Returns this state if it has `elements` elements of one of these types.
    pub(crate) fn checked(
        self,
        entry: &Entry,
        elements: usize,
        types: &[DType],
    ) -> Result<SavedState<'a>, RestoreError> {
        let own = types.iter().find(|dtype| **dtype == self.dtype);
        let expected = *own.unwrap_or(&types[0]);
        if self.dtype == expected && self.bytes.len() == elements * expected.size_in_bytes() {
            return Ok(self);
        }
        Err(RestoreError::Misfit {
            name: entry.name.clone(),
            bytes: self.bytes.len(),
            dtype: self.dtype,
            elements,
            expected,
        })
    }

    /// The bytes of some elements.
    pub(crate) fn part(&self, elements: &Range<usize>) -> Result<Cow<'a, [u8]>, FilesError> {
        let size = self.dtype.size_in_bytes();
        self.bytes.get(elements.start * size..elements.end * size)
    }

    /// Some elements of f32 or bf16, as f32.
    pub(crate) fn widened(&self, elements: &Range<usize>) -> Result<Vec<f32>, FilesError> {
        let mut values = Vec::with_capacity(elements.len());
        widen(self.dtype.into(), &self.part(elements)?, &mut values);
        Ok(values)
    }
}

/// The name of a parameter's state.
pub(crate) fn state_name(entry: &Entry, kind: &str) -> String {
    format!("{}.{kind}", entry.name)
}
