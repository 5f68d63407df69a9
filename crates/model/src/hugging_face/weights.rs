//! Weights from a folder in Hugging Face layout, in one safetensors file or in shards, or from a checkpoint of several
//! ranks, which has them in pieces in the layout's order.

use super::error::WeightsError;
use super::found::{FoundTensor, HEAD, Quantised, bytes_of, find};
use super::outgoing::OutgoingWeights;
use super::turned::Turned;
use super::wrapper::{LeftOut, LeftOutPart, names};
use crate::init::{DrawingOrder, Fresh, initialise};
use crate::parameters::{Parameter, Parameters};
use crate::stored::Stored;
use files::{
    CHUNK_BYTES, CHUNK_ELEMENTS, Dtype, FilesError, TensorParts, TensorSource, Tensors, host_room,
    in_chunks, narrow, widen,
};
use memory::{Codes, Cover, DType, Layer, Layout};
use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use units::CodeBytes;

/// The weights of a folder, to be read in chunks. The folder has every parameter of the model in its shape, and no
/// other tensor.
#[derive(Debug)]
pub struct ModelWeights<'a> {
    pub(super) tensors: Tensors,
    parameters: &'a Parameters,
    /// The tensors of the files that each parameter consists of, in the order of the layout.
    found: Vec<Vec<FoundTensor>>,
    left_out: Option<LeftOut>,
}

/// Some of a parameter, as a folder has it.
pub enum ParameterPart<'a> {
    /// f32 values, from this element of the arena on.
    Values(usize, &'a [f32]),
    /// Bytes of a matrix that is stored as codes, by its index in the layout.
    Codes(usize, CodeBytes<'a>),
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
        let found = parameters
            .in_layout()
            .map(|parameter| match parameter.is_factor {
                true => Ok(Vec::new()),
                false => find(&tensors, parameter).map_err(|(name, it)| wrong((&name, it))),
            });
        let found = found.collect::<Result<Vec<_>, _>>()?;
        let mut weights = ModelWeights {
            tensors,
            parameters,
            found,
            left_out: None,
        };
        let parts = [
            weights.predictor(),
            weights.named_predictor(),
            weights.pictures(),
        ];
        weights.left_out = LeftOut::of(&weights.tensors, parts);
        if let Some(name) = weights.plain_among_codes() {
            let problem = "is plain in a folder of codes; name its module in lora.base_skip";
            return Err(wrong((name, problem.into())));
        }
        match weights.unwanted()? {
            None => Ok(weights),
            Some(unwanted) => Err(wrong(unwanted)),
        }
    }

    /// The tensors that the files have and nobody reads: layers that predict a second token (DeepSeek-V3), the part for pictures, or both.
    pub fn left_out(&self) -> Option<&LeftOut> {
        self.left_out.as_ref()
    }

    /// The type that fits all weights without a type of their own: bf16 if all are bf16 or quantised, else f32.
    pub fn dtype(&self) -> DType {
        let weights = self.parameters.in_layout().zip(&self.found);
        let weights = weights.filter(|(parameter, _)| parameter.dtype.is_none());
        let mut weights = weights.flat_map(|(_, found)| found);
        let fits = |found: &FoundTensor| {
            let dtype = self.tensor(&found.name).dtype;
            dtype == Dtype::BF16 || !matches!(found.quantised, Quantised::No)
        };
        match weights.all(fits) {
            true => DType::BF16,
            false => DType::F32,
        }
    }

    /// A fingerprint of the names, shapes, types and contents of the tensors that the model consists of, however files
    /// divide them.
    ///
    /// # Errors
    /// [`WeightsError::Read`].
    pub fn fingerprint(&self) -> Result<String, WeightsError> {
        let (mut hash, mut all) = (crc32fast::Hasher::new(), 0);
        let found = self.found.iter().flatten();
        let names = found.flat_map(|found| match &found.quantised {
            // The factors of FP8 are no part of older fingerprints.
            Quantised::Fp8(_) => vec![found.name.clone()],
            _ => found.names(),
        });
        for name in names {
            let tensor = self.tensor(&name);
            hash.update(format!("{name} {:?} {:?}", tensor.shape, tensor.dtype).as_bytes());
            let bytes = tensor.bytes.len();
            for chunk in (0..bytes).step_by(CHUNK_BYTES) {
                hash.update(&tensor.bytes.get(chunk..bytes.min(chunk + CHUNK_BYTES))?);
            }
            all += bytes;
        }
        Ok(format!("{all} bytes, CRC-32 {:08x}", hash.finalize()))
    }

    /// Whether these are the weights of a fresh model, in the type of the files.
    ///
    /// # Errors
    /// [`WeightsError::Read`].
    pub fn are_fresh(&self, fresh: Fresh) -> Result<bool, WeightsError> {
        let layout = self.parameters.layout(|_, _| false);
        let stored: Dtype = self.dtype().into();
        // Tensors come in any order, but the elements of each in their own.
        let none = vec![crc32fast::Hasher::new(); layout.entries().len()];
        let (mut own, mut expected) = (none.clone(), none);
        let at = |place: usize| {
            let mut entries = layout.entries().iter();
            let entry = entries.position(|entry| entry.range().contains(&place));
            entry.expect("an element belongs to an entry")
        };
        initialise(
            self.parameters,
            &layout,
            fresh,
            DrawingOrder::Any,
            |first, values| {
                expected[at(first)].update(&narrow(values, stored));
                Ok::<(), WeightsError>(())
            },
        )?;
        self.read(&layout, &layout.all(), |part| {
            match part {
                ParameterPart::Values(first, values) => {
                    own[at(first)].update(&narrow(values, stored))
                }
                ParameterPart::Codes(entry, part) => own[entry].update(part.bytes),
            }
            Ok::<(), WeightsError>(())
        })?;
        let mut pairs = self
            .parameters
            .in_layout()
            .zip(own.into_iter().zip(expected));
        Ok(pairs.all(|(parameter, (own, expected))| {
            parameter.is_factor || own.finalize() == expected.finalize()
        }))
    }

    /// Hands every parameter to `set` in chunks, with their places in what the layout describes. Chunks without a `wanted`
    /// element are not read. A matrix that the files and the layout have as codes is handed over as it is.
    ///
    /// # Errors
    /// [`WeightsError::Read`], or what `set` returns.
    pub fn read<E: From<WeightsError>>(
        &self,
        layout: &Layout,
        wanted: &Cover,
        mut set: impl FnMut(ParameterPart) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut values = Vec::with_capacity(CHUNK_ELEMENTS);
        let parameters = self.parameters.in_layout().zip(layout.entries());
        for (index, (parameter, entry)) in parameters.enumerate() {
            let is_wanted = |place: &Range<usize>| wanted.within(place).elements() > 0;
            if parameter.is_factor {
                continue;
            }
            if entry.codes.is_some() && entry.codes == self.codes(index) {
                self.read_codes(index, |part| set(ParameterPart::Codes(index, part)))?;
                continue;
            }
            if self.is_turned(index, parameter) && matches!(parameter.stored, Stored::ByHead(_)) {
                let first = entry.offset;
                let wanted = |row: &Range<usize>| is_wanted(&(first + row.start..first + row.end));
                self.read_by_head(index, parameter, wanted, &mut |place, row| {
                    set(ParameterPart::Values(first + place, row))
                })?;
                continue;
            }
            if !self.is_turned(index, parameter) {
                for found in &self.found[index] {
                    let first = entry.offset + found.first;
                    let source = found.source(&self.tensors)?;
                    let chunks = in_chunks(0..source.elements());
                    let place = |chunk: &Range<usize>| first + chunk.start..first + chunk.end;
                    for chunk in chunks.filter(|chunk| is_wanted(&place(chunk))) {
                        let place = place(&chunk);
                        source.values(chunk, &mut values)?;
                        set(ParameterPart::Values(place.start, &values))?;
                    }
                }
                continue;
            }
            let tensor = self.tensor(&self.found[index][0].name);
            read_turned(
                &tensor,
                parameter,
                |elements| is_wanted(&(entry.offset + elements.start..entry.offset + elements.end)),
                |first, values| set(ParameterPart::Values(entry.offset + first, values)),
            )?;
        }
        Ok(())
    }

    /// Hands the rows of a matrix whose outputs files have by head to `set`, in the order of memory.
    fn read_by_head<E: From<WeightsError>>(
        &self,
        index: usize,
        parameter: &Parameter,
        is_wanted: impl Fn(&Range<usize>) -> bool,
        set: &mut impl FnMut(usize, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let order = parameter.turned().expect("it is by head").reversed();
        let source = self.found[index][0].source(&self.tensors)?;
        let &[rows, width] = &parameter.shape[..] else {
            unreachable!("it is a matrix");
        };
        let mut values = Vec::with_capacity(width);
        for row in 0..rows {
            let place = row * width..(row + 1) * width;
            if is_wanted(&place) {
                let stored = order.place_in_memory(row) * width;
                source.values(stored..stored + width, &mut values)?;
                set(place.start, &values)?;
            }
        }
        Ok(())
    }

    /// Hands a matrix that the files have as codes to `set` in chunks.
    fn read_codes<E: From<WeightsError>>(
        &self,
        index: usize,
        mut set: impl FnMut(CodeBytes) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut set = |(first, bytes): (usize, Cow<[u8]>)| {
            set(CodeBytes {
                first,
                bytes: &bytes,
            })
        };
        match &self.found[index][0].quantised {
            Quantised::No | Quantised::Fp8(_) => Ok(()),
            Quantised::Nf4(matrix) => {
                let mut parts = matrix.parts(&self.tensors);
                parts.try_for_each(|part| set(part.map_err(WeightsError::Read)?))
            }
            Quantised::Mxfp4(matrix) => {
                let mut parts = matrix.parts(&self.tensors);
                parts.try_for_each(|part| set(part?))
            }
        }
    }

    /// The same weights, to be written into other files under the parameters' names and in one type.
    pub fn converted(&self, dtype: DType) -> impl TensorSource {
        let parameters = self.parameters.in_layout();
        let dtypes: Vec<Dtype> = parameters.map(|one| one.dtype(dtype).into()).collect();
        let bytes = move |index: usize, elements: Range<usize>| {
            let (found, dtype) = (self.holding(index, &elements), dtypes[index]);
            let own = elements.start - found.first..elements.end - found.first;
            let tensor = self.tensor(&found.name);
            if tensor.dtype == dtype && matches!(found.quantised, Quantised::No) {
                return bytes_of(&tensor, own).map_err(io_error);
            }
            let mut values = Vec::with_capacity(elements.len());
            let source = found.source(&self.tensors).map_err(io_error)?;
            source.values(own, &mut values).map_err(io_error)?;
            Ok(Cow::Owned(narrow(&values, dtype).into_owned()))
        };
        let is_as_stored = |index| match &self.tensors {
            Tensors::Whole(_) => self.codes(index).is_none(),
            Tensors::InPieces(_) => false,
        };
        OutgoingWeights::some_as_stored(self.parameters, dtype, bytes, is_as_stored)
    }

    /// Whether the files store a parameter in another order than memory.
    fn is_turned(&self, index: usize, parameter: &Parameter) -> bool {
        matches!(self.tensors, Tensors::Whole(_))
            && parameter.turned().is_some()
            && self.codes(index).is_none()
    }

    /// How the files have a parameter as codes, by its index in the layout.
    fn codes(&self, index: usize) -> Option<Codes> {
        self.found[index].first()?.codes()
    }

    /// The same for the parameter of a name.
    pub(super) fn codes_of(&self, name: &str) -> Option<Codes> {
        let mut parameters = self.parameters.in_layout();
        self.codes(parameters.position(|parameter| parameter.name == name)?)
    }

    /// A matrix that would become codes, in a folder that has codes of others: nobody chose these.
    fn plain_among_codes(&self) -> Option<&str> {
        let coded = self.parameters.in_layout().enumerate();
        let coded = coded.filter(|(_, parameter)| parameter.codes.is_some());
        let (own, plain): (Vec<_>, Vec<_>) =
            coded.partition(|(index, _)| self.codes(*index).is_some());
        let plain = plain.first().filter(|_| !own.is_empty());
        plain.map(|(_, parameter)| &parameter.name[..])
    }

    fn tensor(&self, name: &str) -> TensorParts<'_> {
        let tensor = self.tensors.get(name);
        tensor.expect("it was found when the files were opened")
    }

    /// The tensor with some elements of a parameter. Parts of a file that is written lie in one of a file that is read.
    fn holding(&self, index: usize, elements: &Range<usize>) -> &FoundTensor {
        let found = &self.found[index];
        let after = found.partition_point(|tensor| tensor.first <= elements.start);
        &found[after - 1]
    }

    /// The layer after the model's last, if the files have one that predicts a second token, as DeepSeek-V3's have.
    fn predictor(&self) -> Option<LeftOutPart> {
        let mut parameters = self.parameters.in_layout();
        parameters.find(|parameter| parameter.name.ends_with(CHOICE_BIAS))?;
        let parts = self.parameters.in_layout().map(|parameter| parameter.part);
        let blocks = parts.filter_map(|part| match part {
            Layer::Block(block) => Some(block),
            _ => None,
        });
        let beginning = format!("model.layers.{}.", blocks.max()? + 1);
        let is_there = self.tensors.get(&format!("{beginning}{PREDICTOR}"));
        is_there.map(|_| LeftOutPart {
            beginnings: vec![beginning],
            reason: PREDICTS,
        })
    }

    /// Such layers under a name of their own, as folders of Qwen have them beside the gated delta rule.
    fn named_predictor(&self) -> Option<LeftOutPart> {
        let mut parameters = self.parameters.in_layout();
        parameters.find(|parameter| parameter.name.contains(".linear_attn."))?;
        LeftOutPart::those_there(&self.tensors, &["mtp."], PREDICTS)
    }

    fn pictures(&self) -> Option<LeftOutPart> {
        let found = self.found.iter().flatten();
        LeftOutPart::pictures(&self.tensors, found.map(|found| &found.name[..]))
    }

    /// A tensor that the model does not have, and the reason for refusing it.
    fn unwanted(&self) -> Result<Option<(&str, String)>, FilesError> {
        let found = self.found.iter().flatten();
        let known: HashSet<String> = found.flat_map(FoundTensor::names).collect();
        let is_left_out = |name: &str| {
            let left_out = self.left_out.as_ref();
            left_out.is_some_and(|left_out| left_out.has(name))
        };
        let extra = self.tensors.names().into_iter();
        let extra = extra.filter(|name| !known.contains(*name) && !is_buffer(name));
        for name in extra.filter(|name| !is_left_out(name)) {
            let problem = match names(HEAD).any(|head| head == name) {
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
        let is_it = |name: &&String| EMBEDDINGS.iter().any(|end| name.ends_with(end));
        let names = self.found.iter().flatten().map(|found| &found.name);
        let embedding = names.into_iter().find(is_it);
        let embedding = embedding.and_then(|embedding| self.tensors.get(embedding));
        match (embedding, self.tensors.get(head)) {
            (Some(one), Some(other)) if (one.dtype, one.shape) == (other.dtype, other.shape) => {
                one.bytes.equal(&other.bytes)
            }
            _ => Ok(false),
        }
    }
}

/// The ends of the embedding's names.
const EMBEDDINGS: [&str; 2] = ["embed_tokens.weight", "wte.weight"];

/// Whether this is a tensor that older versions of transformers saved beside the weights: wavelengths and causal masks.
fn is_buffer(name: &str) -> bool {
    const ENDS: [&str; 3] = [".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"];
    ENDS.iter().any(|end| name.ends_with(end))
}

/// Why layers that predict a second token are left out.
const PREDICTS: &str = "they predict a second token, and are no part of the model";

/// What only a layer that predicts a second token has.
const PREDICTOR: &str = "eh_proj.weight";

/// The end of the names of the biases of routers' choices.
const CHOICE_BIAS: &str = ".gate.e_score_correction_bias";

fn io_error(error: WeightsError) -> std::io::Error {
    match error {
        WeightsError::Read(error) => error.into(),
        other => std::io::Error::other(other),
    }
}

/// Reads the `wanted` elements of all parameters from a folder and hands them to `set` ([`ModelWeights::read`]). Gives what
/// was left out, if anything ([`ModelWeights::left_out`]).
///
/// # Errors
/// [`WeightsError`], or what `set` returns.
pub fn import<E: From<WeightsError>>(
    folder: &Path,
    parameters: &Parameters,
    layout: &Layout,
    wanted: &Cover,
    set: impl FnMut(ParameterPart) -> Result<(), E>,
) -> Result<Option<LeftOut>, E> {
    let weights = ModelWeights::open(folder, parameters)?;
    weights.read(layout, wanted, set)?;
    Ok(weights.left_out)
}

/// Hands the `wanted` elements of a tensor that is the transpose of what is in memory to `set`, in chunks in the order of memory.
pub(super) fn read_turned<E: From<WeightsError>>(
    tensor: &TensorParts,
    parameter: &Parameter,
    is_wanted: impl Fn(&Range<usize>) -> bool,
    mut set: impl FnMut(usize, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let turned = parameter.turned();
    let turned = turned.expect("files have its transpose");
    let (dtype, size) = (tensor.dtype, tensor.dtype.bitsize() / 8);
    let bytes = |elements| bytes_of(tensor, elements).map_err(E::from);
    let stored = Turned::new(turned.reversed(), size);
    let mut room = host_room(stored.room()).map_err(WeightsError::Read)?;
    let mut values = Vec::with_capacity(CHUNK_ELEMENTS);
    stored.each(&mut room, is_wanted, bytes, |elements, turned| {
        let mut chunks = in_chunks(0..elements.len());
        chunks.try_for_each(|chunk| {
            values.clear();
            let bytes = &turned[chunk.start * size..chunk.end * size];
            widen(dtype, bytes, &mut values);
            set(elements.start + chunk.start, &values)
        })
    })
}
