//! Weights on their way from arenas into files.

use super::turned::Turned;
use crate::parameters::{Parameter, Parameters};
use crate::stored::{FileTensor, Transposition};
use files::{TensorSource, TensorSpec, host_room, in_chunks};
use memory::DType;
use std::borrow::Cow;
use std::io::{self, Write};
use std::ops::Range;

/// A model's weights on their way from arenas into files.
pub struct OutgoingWeights<F> {
    specs: Vec<TensorSpec>,
    sources: Vec<Source>,
    bytes: F,
}

/// Where a file's tensor comes from.
#[derive(Clone, Copy)]
struct Source {
    /// The parameter's index in the layout.
    parameter: usize,
    /// The place of the first element in it.
    first: usize,
    /// How files order it, if in another way than memory.
    turned: Option<Transposition>,
}

impl<'a, F: Fn(usize, Range<usize>) -> io::Result<Cow<'a, [u8]>>> OutgoingWeights<F> {
    /// `bytes(index, elements)` returns elements of the parameter with this index in the layout, little-endian in
    /// `dtype`, and not transposed. It is called for one chunk at a time, in order, when the chunk is written. For a
    /// parameter that files store transposed, it may be called for all elements several times.
    pub fn new(parameters: &Parameters, dtype: DType, bytes: F) -> Self {
        OutgoingWeights {
            specs: file_specs(parameters, dtype),
            sources: sources(parameters),
            bytes,
        }
    }

    /// As `new`, if `bytes` returns some parameters as files store them.
    pub(super) fn some_as_stored(
        parameters: &Parameters,
        dtype: DType,
        bytes: F,
        is_as_stored: impl Fn(usize) -> bool,
    ) -> Self {
        let mut outgoing = OutgoingWeights::new(parameters, dtype, bytes);
        let sources = outgoing.sources.iter_mut();
        let stored = sources.filter(|source| is_as_stored(source.parameter));
        stored.for_each(|source| source.turned = None);
        outgoing
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
        let source = self.sources[index];
        let bytes = |elements: Range<usize>| {
            let elements = source.first + elements.start..source.first + elements.end;
            (self.bytes)(source.parameter, elements)
        };
        let Some(turned) = source.turned else {
            let mut chunks = in_chunks(0..shape.iter().product());
            return chunks.try_for_each(|chunk| out.write_all(&bytes(chunk)?));
        };
        let used = Turned::new(turned, dtype.bitsize() / 8);
        let mut room = host_room(used.room())?;
        used.each(
            &mut room,
            |_| true,
            bytes,
            |_, turned| out.write_all(turned),
        )
    }
}

/// The tensors of files of this type, in the order of the layout.
pub fn file_specs(parameters: &Parameters, dtype: DType) -> Vec<TensorSpec> {
    let specs = |parameter: &Parameter| {
        let dtype = parameter.dtype(dtype).into();
        let tensors = parameter.file_tensors().into_iter();
        tensors.map(move |FileTensor { name, shape, .. }| TensorSpec { name, dtype, shape })
    };
    parameters.in_layout().flat_map(specs).collect()
}

/// The parameter that each tensor of a file comes from, by its index in the layout, and the place of the tensor's first element in it, in
/// the order of [`file_specs`].
pub fn sources_of_files(parameters: &Parameters) -> Vec<(usize, usize)> {
    let sources = sources(parameters).into_iter();
    sources
        .map(|source| (source.parameter, source.first))
        .collect()
}

fn sources(parameters: &Parameters) -> Vec<Source> {
    let of_parameter = |(parameter, declared): (usize, &Parameter)| {
        let turned = declared.turned();
        let tensors = declared.file_tensors().into_iter();
        tensors.map(move |FileTensor { first, .. }| Source {
            parameter,
            first,
            turned,
        })
    };
    let parameters = parameters.in_layout().enumerate();
    parameters.flat_map(of_parameter).collect()
}
