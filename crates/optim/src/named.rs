//! States by parameter and name, as they are saved into a checkpoint.

use crate::store::Store;
use kernels::{Kernels, Result};
use memory::{DType, In};
use std::ops::Range;

/// A state of a parameter, or of some of its elements, to be saved.
pub struct NamedState<'a> {
    /// The parameter's name, a dot, and the state's name. State names are `first_moment`, `second_moment`, `momentum`
    /// (f32 or bf16), their `.codes` (u8) and `.absmax` (f32, one per 256 values), `master` (f32), and `remainder`
    /// (i16, or u8 of a master of 24 bits).
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// The range of the parameter's state that this is.
    pub elements: Range<usize>,
    /// The number of elements of the state for the whole parameter.
    pub whole: usize,
    pub(crate) from: ReadFrom<'a>,
}

/// Where a state is read from.
pub(crate) enum ReadFrom<'a> {
    /// On the device.
    Device(In<'a>),
    /// Ranges of bytes in the store.
    Chunks(&'a dyn Store, Vec<Range<usize>>),
}

impl NamedState<'_> {
    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.elements.len() * self.dtype.size_in_bytes()
    }

    /// Copies the elements.
    ///
    /// # Errors
    /// `KernelError` if the device or a disk fails, or `bytes` have another size.
    pub fn read(&self, kernels: &Kernels, bytes: &mut [u8]) -> Result {
        match &self.from {
            ReadFrom::Device(view) => kernels.download(bytes, *view),
            ReadFrom::Chunks(store, ranges) => store.read_all(kernels, ranges, bytes),
        }
    }
}
