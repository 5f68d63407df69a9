//! Weights on their way from arenas into files.

use super::turned::Turned;
use crate::parameters::{Parameter, Parameters, Stored};
use files::{TensorSource, TensorSpec, host_room, in_chunks};
use memory::DType;
use std::borrow::Cow;
use std::io::{self, Write};
use std::ops::Range;

/// A model's weights on their way from arenas into files.
pub struct OutgoingWeights<F> {
    specs: Vec<TensorSpec>,
    stored: Vec<Stored>,
    bytes: F,
}

impl<'a, F: Fn(usize, Range<usize>) -> io::Result<Cow<'a, [u8]>>> OutgoingWeights<F> {
    /// `bytes(index, elements)` returns elements of the parameter with this index in the layout, little-endian in
    /// `dtype`, and not transposed. It is called for one chunk at a time, in order, when the chunk is written. For a
    /// parameter that files store transposed, it may be called for all elements several times.
    pub fn new(parameters: &Parameters, dtype: DType, bytes: F) -> Self {
        let stored = parameters.in_layout().map(|parameter| parameter.stored);
        OutgoingWeights {
            specs: file_specs(parameters, dtype),
            stored: stored.collect(),
            bytes,
        }
    }

    /// As `new`, if `bytes` returns parameters as files store them.
    pub(super) fn as_stored(parameters: &Parameters, dtype: DType, bytes: F) -> Self {
        let specs = file_specs(parameters, dtype);
        OutgoingWeights {
            stored: vec![Stored::AsUsed; specs.len()],
            specs,
            bytes,
        }
    }
}

impl<'a, F> TensorSource for OutgoingWeights<F>
where
    F: Fn(usize, Range<usize>) -> io::Result<Cow<'a, [u8]>>,
{
    fn tensors(&self) -> &[TensorSpec] {
        &self.specs
    }

    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
        let TensorSpec { dtype, shape, .. } = &self.specs[index];
        let bytes = |elements| (self.bytes)(index, elements);
        if self.stored[index] == Stored::AsUsed {
            let mut chunks = in_chunks(0..shape.iter().product());
            return chunks.try_for_each(|chunk| out.write_all(&bytes(chunk)?));
        }
        let used = Turned {
            rows: shape[1],
            columns: shape[0],
            size: dtype.bitsize() / 8,
        };
        let mut room = host_room(used.room())?;
        used.each(
            &mut room,
            |_| true,
            bytes,
            |_, turned| out.write_all(turned),
        )
    }
}

/// The parameters as tensors of a file of this type, in the order of the layout.
pub fn file_specs(parameters: &Parameters, dtype: DType) -> Vec<TensorSpec> {
    let spec = |parameter: &Parameter| TensorSpec {
        name: parameter.name.clone(),
        dtype: parameter.dtype(dtype).into(),
        shape: parameter.stored_shape(),
    };
    parameters.in_layout().map(spec).collect()
}
