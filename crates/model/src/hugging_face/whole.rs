//! Models for pictures and text whose text part was trained: what their folders have beside it is written with it.

use super::origin::Origin;
use super::weights::ModelWeights;
use super::wrapper::name_among;
use files::{CHUNK_BYTES, TensorSource, TensorSpec, Tensors};
use std::io::{self, Write};

/// A folder with a model for pictures and text, whose text part a run trained.
#[derive(Debug)]
pub struct WholeModel<'a> {
    origin: Origin,
    weights: ModelWeights<'a>,
}

impl<'a> WholeModel<'a> {
    /// Takes a folder's files and weights; none if exports are of the text part alone ([`LeftOut::is_exported`](crate::LeftOut::is_exported)).
    pub fn of(origin: Origin, weights: ModelWeights<'a>) -> Option<WholeModel<'a>> {
        let left_out = weights.left_out();
        let is_whole = origin.has_wrapper() && left_out.is_some_and(|it| it.is_exported());
        is_whole.then_some(WholeModel { origin, weights })
    }

    /// The beginnings of the names of the tensors that were not trained.
    pub fn beginnings(&self) -> impl Iterator<Item = &str> {
        let left_out = self.weights.left_out().into_iter();
        left_out.flat_map(|left_out| left_out.beginnings())
    }

    /// The files of a text model ([`Origin::files`]) as those of the whole one: `config.json` is the folder's with what changed of the
    /// text part, and files for processing pictures are the folder's.
    pub fn files(&self, text: Vec<(String, Vec<u8>)>) -> Vec<(String, Vec<u8>)> {
        self.origin.around(text)
    }

    /// A text model's tensors under the names of the folder, and then those that were not trained, as the folder has them.
    pub fn with_text<'b>(&'b self, text: &'b dyn TensorSource) -> impl TensorSource + 'b {
        let tensors = &self.weights.tensors;
        let names = tensors.names();
        let of_text = text.tensors().iter().map(|spec| TensorSpec {
            name: name_among(&names, &spec.name),
            ..spec.clone()
        });
        let mut specs: Vec<_> = of_text.collect();
        specs.extend(self.untrained());
        Whole {
            specs,
            text,
            tensors,
        }
    }

    /// Bytes of the tensors that were not trained.
    pub fn untrained_bytes(&self) -> u64 {
        self.untrained().map(|spec| spec.bytes()).sum()
    }

    /// The tensors that were not trained.
    fn untrained(&self) -> impl Iterator<Item = TensorSpec> {
        let left_out = self.weights.left_out();
        let mut names = self.weights.tensors.names();
        names.retain(|name| left_out.is_some_and(|left_out| left_out.has(name)));
        names.into_iter().filter_map(|name| {
            let tensor = self.weights.tensors.get(name)?;
            Some(TensorSpec {
                name: name.into(),
                dtype: tensor.dtype,
                shape: tensor.shape.to_vec(),
            })
        })
    }
}

/// The tensors of a text model, and then those that a folder has beside it.
struct Whole<'a> {
    specs: Vec<TensorSpec>,
    text: &'a dyn TensorSource,
    tensors: &'a Tensors,
}

impl TensorSource for Whole<'_> {
    fn tensors(&self) -> &[TensorSpec] {
        &self.specs
    }

    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
        if index < self.text.tensors().len() {
            return self.text.write_to(index, out);
        }
        let tensor = self.tensors.get(&self.specs[index].name);
        let bytes = tensor.expect("it was listed with the folder's").bytes;
        let mut starts = (0..bytes.len()).step_by(CHUNK_BYTES);
        starts.try_for_each(|start| {
            out.write_all(&bytes.get(start..bytes.len().min(start + CHUNK_BYTES))?)
        })
    }
}
