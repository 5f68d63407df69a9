//! States by parameter and name, on their way into a checkpoint.

use crate::store::Store;
use kernels::{KernelError, Kernels};
use memory::{DType, In};
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
    /// In ranges of bytes that lie in chunks.
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
            ReadFrom::Chunks(store, ranges) => store.read(kernels, ranges, bytes),
        }
    }
}
