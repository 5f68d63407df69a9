//! Weights from a folder in Hugging Face layout, in one safetensors file or in shards, or from a checkpoint of several
//! ranks, which has them in pieces in the layout's order.

use super::outgoing::OutgoingWeights;
use super::turned::Turned;
use crate::parameters::{Parameter, Parameters, Stored};
use files::{
    CHUNK_ELEMENTS, Dtype, FilesError, TensorParts, TensorSource, Tensors, host_room, in_chunks,
    narrow, widen,
};
use memory::{Cover, DType, Layout};
use std::borrow::Cow;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Weights could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A file is missing, cannot be read, or is damaged.
    #[error(transparent)]
    Read(FilesError),
    /// A tensor that the model needs is missing or has another shape, or the model has no tensor of this name.
    #[error("{path}: tensor `{name}` {problem}")]
    Tensor {
        /// The folder.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A file could not be written.
    #[error(transparent)]
    Write(FilesError),
}

impl From<FilesError> for WeightsError {
    fn from(error: FilesError) -> WeightsError {
        WeightsError::Read(error)
    }
}

/// The weights of a folder, to be read in chunks. The folder has every parameter of the model in its shape, and no
/// other tensor.
#[derive(Debug)]
pub struct ModelWeights<'a> {
    tensors: Tensors,
    parameters: &'a Parameters,
    /// The parameters' names in the files, in the order of the layout.
    names: Vec<String>,
}

impl<'a> ModelWeights<'a> {
    /// Opens `model.safetensors`, or the shards of `model.safetensors.index.json`, or the files of several ranks, and
    /// finds every parameter.
    ///
    /// # Errors
    /// [`WeightsError`] that names the file or the tensor. A tensor is refused if it is missing, has another shape or a
    /// type that cannot be widened, or is not the model's. Buffers that follow from `config.json` are ignored, and so
    /// is a head that equals the embedding to which it is tied.
    pub fn open(folder: &Path, parameters: &'a Parameters) -> Result<Self, WeightsError> {
        let tensors = Tensors::open_folder(folder, "model").map_err(WeightsError::Read)?;
        let wrong = |(name, problem): (&str, String)| WeightsError::Tensor {
            path: folder.into(),
            name: name.into(),
            problem,
        };
        let names = parameters
            .in_layout()
            .map(|parameter| find(&tensors, parameter).map_err(|it| wrong((&parameter.name, it))));
        let names = names.collect::<Result<Vec<_>, _>>()?;
        let weights = ModelWeights {
            tensors,
            parameters,
            names,
        };
        match weights.unwanted()? {
            None => Ok(weights),
            Some(unwanted) => Err(wrong(unwanted)),
        }
    }

    /// The type that fits all weights without a type of their own: bf16 if all are bf16, else f32.
    pub fn dtype(&self) -> DType {
        let weights = self.parameters.in_layout().enumerate();
        let mut weights = weights.filter(|(_, parameter)| parameter.dtype.is_none());
        match weights.all(|(index, _)| self.tensor(index).dtype == Dtype::BF16) {
            true => DType::BF16,
            false => DType::F32,
        }
    }

    /// Hands every parameter to `set` in chunks: the first element's place in the arena that the layout describes, and
    /// f32 values. Chunks without a `wanted` element are not read.
    ///
    /// # Errors
    /// [`WeightsError::Read`], or what `set` returns.
    pub fn read<E: From<WeightsError>>(
        &self,
        layout: &Layout,
        wanted: &Cover,
        mut set: impl FnMut(usize, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut values = Vec::with_capacity(CHUNK_ELEMENTS);
        let parameters = self.parameters.in_layout().zip(layout.entries());
        for (index, (parameter, entry)) in parameters.enumerate() {
            let tensor = self.tensor(index);
            let (dtype, size) = (tensor.dtype, tensor.dtype.bitsize() / 8);
            let bytes = |elements| bytes_of(&tensor, elements).map_err(E::from);
            let is_wanted = |elements: &Range<usize>| {
                let place = entry.offset + elements.start..entry.offset + elements.end;
                wanted.within(&place).elements() > 0
            };
            let mut set = |first: usize, bytes: &[u8]| {
                values.clear();
                widen(dtype, bytes, &mut values);
                set(entry.offset + first, &values)
            };
            if !self.is_transposed(parameter) {
                let mut chunks = in_chunks(0..entry.elements()).filter(is_wanted);
                chunks.try_for_each(|chunk| set(chunk.start, &bytes(chunk)?))?;
                continue;
            }
            let stored = Turned {
                rows: tensor.shape[0],
                columns: tensor.shape[1],
                size,
            };
            let mut room = host_room(stored.room()).map_err(WeightsError::Read)?;
            stored.each(&mut room, is_wanted, bytes, |elements, turned| {
                let first = elements.start;
                let mut chunks = in_chunks(0..elements.len());
                chunks.try_for_each(|chunk| {
                    set(
                        first + chunk.start,
                        &turned[chunk.start * size..chunk.end * size],
                    )
                })
            })?;
        }
        Ok(())
    }

    /// The same weights, to be written into other files under the parameters' names and in one type.
    pub fn converted(&self, dtype: DType) -> impl TensorSource {
        let parameters = self.parameters.in_layout();
        let dtypes: Vec<Dtype> = parameters.map(|one| one.dtype(dtype).into()).collect();
        let bytes = move |index: usize, elements: Range<usize>| {
            let (tensor, dtype) = (self.tensor(index), dtypes[index]);
            let bytes = bytes_of(&tensor, elements.clone()).map_err(|error| match error {
                WeightsError::Read(error) => error.into(),
                other => std::io::Error::other(other),
            })?;
            if tensor.dtype == dtype {
                return Ok(bytes);
            }
            let mut values = Vec::with_capacity(elements.len());
            widen(tensor.dtype, &bytes, &mut values);
            Ok(Cow::Owned(narrow(&values, dtype).into_owned()))
        };
        match &self.tensors {
            Tensors::Whole(_) => OutgoingWeights::as_stored(self.parameters, dtype, bytes),
            Tensors::InPieces(_) => OutgoingWeights::new(self.parameters, dtype, bytes),
        }
    }

    /// Whether the files store a parameter transposed.
    fn is_transposed(&self, parameter: &Parameter) -> bool {
        matches!(self.tensors, Tensors::Whole(_)) && parameter.stored == Stored::Transposed
    }

    fn tensor(&self, index: usize) -> TensorParts<'_> {
        let tensor = self.tensors.get(&self.names[index]);
        tensor.expect("it was found when the files were opened")
    }

    /// A tensor that the model does not have, and the reason for refusing it.
    fn unwanted(&self) -> Result<Option<(&str, String)>, FilesError> {
        let known: std::collections::HashSet<&str> =
            self.names.iter().map(String::as_str).collect();
        let extra = self.tensors.names().into_iter();
        for name in extra.filter(|name| !known.contains(name) && !is_buffer(name)) {
            let problem = match name == HEAD {
                true if self.is_embedding(name)? => continue,
                true => {
                    "differs from the embedding, but config.json ties them; set \"tie_word_embeddings\" to false there if both were trained"
                }
                false => {
                    "is not one of the model's: what config.json describes has no such weights"
                }
            };
            return Ok(Some((name, problem.into())));
        }
        Ok(None)
    }

    /// Whether a head has the same bytes as the embedding.
    fn is_embedding(&self, head: &str) -> Result<bool, FilesError> {
        let is_it = |name: &String| EMBEDDINGS.iter().any(|end| name.ends_with(end));
        let embedding = self.names.iter().find(|name| is_it(name));
        let embedding = embedding.and_then(|embedding| self.tensors.get(embedding));
        match (embedding, self.tensors.get(head)) {
            (Some(one), Some(other)) if (one.dtype, one.shape) == (other.dtype, other.shape) => {
                one.bytes.equal(&other.bytes)
            }
            _ => Ok(false),
        }
    }
}

/// The head's name in all families. A head that is a parameter of its own is not tied.
const HEAD: &str = "lm_head.weight";

/// The ends of the embedding's names.
const EMBEDDINGS: [&str; 2] = ["embed_tokens.weight", "wte.weight"];

/// Whether this is a tensor that older versions of transformers saved beside the weights: wavelengths and causal masks.
fn is_buffer(name: &str) -> bool {
    const ENDS: [&str; 3] = [".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"];
    ENDS.iter().any(|end| name.ends_with(end))
}

/// A parameter's name in the files, if it has the right shape and a type that can be widened.
fn find(tensors: &Tensors, parameter: &Parameter) -> Result<String, String> {
    // GPT-2's own files leave out the first part of the name, `transformer.`.
    let short = parameter.name.strip_prefix("transformer.");
    let mut names = [Some(parameter.name.as_str()), short].into_iter().flatten();
    let found = names.find_map(|name| Some((name, tensors.get(name)?)));
    let (name, tensor) = found.ok_or("is missing")?;
    let needed = match tensors {
        Tensors::Whole(_) => parameter.stored_shape(),
        Tensors::InPieces(_) => parameter.shape.clone(),
    };
    if tensor.shape != needed {
        return Err(format!(
            "has shape {:?}; the model needs {needed:?}",
            tensor.shape
        ));
    }
    match tensor.dtype {
        Dtype::F32 | Dtype::BF16 | Dtype::F16 => Ok(name.into()),
        other => Err(format!(
            "holds {other:?}; convert the model to F32, BF16 or F16"
        )),
    }
}

/// Reads the `wanted` elements of all parameters from a folder and hands them to `set` ([`ModelWeights::read`]).
///
/// # Errors
/// [`WeightsError`], or what `set` returns.
pub fn import<E: From<WeightsError>>(
    folder: &Path,
    parameters: &Parameters,
    layout: &Layout,
    wanted: &Cover,
    set: impl FnMut(usize, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    ModelWeights::open(folder, parameters)?.read(layout, wanted, set)
}

/// The bytes of some elements of a tensor, as its files have them.
fn bytes_of<'a>(
    tensor: &TensorParts<'a>,
    elements: Range<usize>,
) -> Result<Cow<'a, [u8]>, WeightsError> {
    let size = tensor.dtype.bitsize() / 8;
    Ok(tensor
        .bytes
        .get(elements.start * size..elements.end * size)?)
}
