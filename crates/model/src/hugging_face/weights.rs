//! Weights in Hugging Face layout: safetensors, one file or sharded.

use crate::parameters::{Parameter, Parameters, Stored};
use candle_core::safetensors::MmapedSafetensors;
use half::{bf16, f16};
use memory::{DType, Layout};
use safetensors::tensor::{Dtype, TensorView, View, serialize_to_file};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Weights could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The folder holds no weights.
    #[error("{0} holds neither model.safetensors nor model.safetensors.index.json")]
    Missing(PathBuf),
    /// A file could not be read.
    #[error("the weights in {path} cannot be read ({source}); copy or write them again")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: candle_core::Error,
    },
    /// The index of a sharded model is not one.
    #[error("{0} is not an index of safetensors files")]
    Index(PathBuf),
    /// A tensor that the model needs is missing or has another shape.
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
    #[error("{path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: safetensors::SafeTensorError,
    },
}

/// Values that are handed over at a time when a model is filled: what host memory loading needs.
pub(crate) const CHUNK: usize = 256 * 1024;

/// Reads every parameter from a folder and hands it to `set` in chunks: the first element's place in the arena that
/// the layout describes, and f32 values. Tensors that the model does not have are ignored.
///
/// # Errors
/// [`WeightsError`], or what `set` returns.
pub fn import<E: From<WeightsError>>(
    folder: &Path,
    parameters: &Parameters,
    layout: &Layout,
    mut set: impl FnMut(usize, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let files = weight_files(folder)?;
    let read = |source| WeightsError::Read {
        path: folder.to_path_buf(),
        source,
    };
    // SAFETY: the files are mapped for reading; whoever truncates them meanwhile ends the process, as with any map.
    let tensors = unsafe { MmapedSafetensors::multi(&files) }.map_err(read)?;
    let names = tensors.tensors().into_iter().map(|(name, _)| name);
    if let Some(name) = names.into_iter().find(|name| name.ends_with("o_proj.bias")) {
        let problem = "is a bias that these models do not have".into();
        return Err(WeightsError::Tensor {
            path: folder.into(),
            name,
            problem,
        }
        .into());
    }
    let mut values = Vec::with_capacity(CHUNK);
    for (parameter, entry) in parameters.in_layout().zip(layout.entries()) {
        let tensor = find(folder, &tensors, parameter)?;
        let read = |first: usize, values: &mut Vec<f32>| {
            values.clear();
            let elements = first..entry.elements().min(first + CHUNK);
            widen(
                tensor.dtype(),
                &stored_bytes(&tensor, parameter, elements),
                values,
            );
        };
        for first in (0..entry.elements()).step_by(CHUNK) {
            read(first, &mut values);
            set(entry.offset + first, &values)?;
        }
    }
    Ok(())
}

/// A tensor of the model, of the right shape and a type that can be widened.
fn find<'a>(
    folder: &Path,
    tensors: &'a MmapedSafetensors,
    parameter: &Parameter,
) -> Result<TensorView<'a>, WeightsError> {
    let wrong = |problem: String| WeightsError::Tensor {
        path: folder.into(),
        name: parameter.name.clone(),
        problem,
    };
    // GPT-2's own files leave out the name of the part that is not the head.
    let short = parameter.name.strip_prefix("transformer.");
    let names = [Some(parameter.name.as_str()), short];
    let mut found = names
        .into_iter()
        .flatten()
        .map(|name| tensors.get(name).ok());
    let tensor = found
        .find_map(|tensor| tensor)
        .ok_or_else(|| wrong("is missing".into()))?;
    if tensor.shape() != parameter.stored_shape() {
        return Err(wrong(format!(
            "has shape {:?}; the model needs {:?}",
            tensor.shape(),
            parameter.stored_shape()
        )));
    }
    match tensor.dtype() {
        Dtype::F32 | Dtype::BF16 | Dtype::F16 => Ok(tensor),
        other => Err(wrong(format!(
            "holds {other:?}; convert the model to F32, BF16 or F16"
        ))),
    }
}

/// The bytes of some elements of a parameter, wherever its tensor has them.
fn stored_bytes<'a>(
    tensor: &TensorView<'a>,
    parameter: &Parameter,
    elements: Range<usize>,
) -> Cow<'a, [u8]> {
    let (data, size) = (tensor.data(), tensor.dtype().bitsize() / 8);
    match parameter.stored {
        Stored::AsUsed => Cow::Borrowed(&data[elements.start * size..elements.end * size]),
        Stored::Transposed => {
            let [outputs, inputs] = [parameter.shape[0], parameter.shape[1]];
            let places = elements.map(|element| element % inputs * outputs + element / inputs);
            let bytes = places.flat_map(|place| &data[place * size..(place + 1) * size]);
            Cow::Owned(bytes.copied().collect())
        }
    }
}

/// Appends little-endian elements as f32.
fn widen(dtype: Dtype, data: &[u8], values: &mut Vec<f32>) {
    let halves = || data.chunks_exact(2).map(|bytes| [bytes[0], bytes[1]]);
    match dtype {
        Dtype::BF16 => values.extend(halves().map(|bytes| bf16::from_le_bytes(bytes).to_f32())),
        Dtype::F16 => values.extend(halves().map(|bytes| f16::from_le_bytes(bytes).to_f32())),
        _ => {
            let words = data
                .chunks_exact(4)
                .map(|bytes| [bytes[0], bytes[1], bytes[2], bytes[3]]);
            values.extend(words.map(f32::from_le_bytes));
        }
    }
}

/// The files that hold a model's weights.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>, WeightsError> {
    let single = folder.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![single]);
    }
    let index = folder.join("model.safetensors.index.json");
    let Ok(text) = std::fs::read_to_string(&index) else {
        return Err(WeightsError::Missing(folder.into()));
    };
    let json: Option<serde_json::Value> = serde_json::from_str(&text).ok();
    let map = json
        .as_ref()
        .and_then(|json| json["weight_map"].as_object());
    let names: Option<BTreeSet<&str>> =
        map.and_then(|map| map.values().map(|file| file.as_str()).collect());
    match names {
        Some(names) if !names.is_empty() => {
            Ok(names.into_iter().map(|name| folder.join(name)).collect())
        }
        _ => Err(WeightsError::Index(index)),
    }
}

/// A tensor whose bytes are fetched when they are written, so that a model is never twice in memory.
struct Lazy<'a, F> {
    dtype: Dtype,
    parameter: &'a Parameter,
    shape: Vec<usize>,
    index: usize,
    bytes: &'a F,
}

impl<F: Fn(usize) -> Vec<u8>> View for Lazy<'_, F> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = (self.bytes)(self.index);
        Cow::Owned(match self.parameter.stored {
            Stored::AsUsed => bytes,
            Stored::Transposed => transposed(&bytes, &self.shape),
        })
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// A matrix of this shape, from the bytes of its transpose.
fn transposed(bytes: &[u8], shape: &[usize]) -> Vec<u8> {
    let [rows, columns] = [shape[0], shape[1]];
    let size = bytes.len() / (rows * columns);
    let element = |row, column| {
        let at = (column * rows + row) * size;
        &bytes[at..at + size]
    };
    let rows = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
    rows.flat_map(|(row, column)| element(row, column))
        .copied()
        .collect()
}

/// Writes a tensor for each parameter, in the order of their layout, to one safetensors file. `bytes(index)` are the tensor's little-endian elements; it is
/// called for one tensor after the other.
///
/// # Errors
/// [`WeightsError::Write`].
pub fn export(
    path: &Path,
    parameters: &Parameters,
    dtype: DType,
    bytes: impl Fn(usize) -> Vec<u8>,
) -> Result<(), WeightsError> {
    let dtype = if dtype == DType::BF16 {
        Dtype::BF16
    } else {
        Dtype::F32
    };
    let tensors = parameters
        .in_layout()
        .enumerate()
        .map(|(index, parameter)| {
            let tensor = Lazy {
                dtype,
                parameter,
                shape: parameter.stored_shape(),
                index,
                bytes: &bytes,
            };
            (parameter.name.as_str(), tensor)
        });
    let metadata = [("format".to_string(), "pt".to_string())].into();
    let written = serialize_to_file(tensors, Some(metadata), path);
    written.map_err(|source| WeightsError::Write {
        path: path.to_path_buf(),
        source,
    })
}

/// The bytes of f32 values in a compute type.
pub fn encode(values: &[f32], dtype: DType) -> Cow<'_, [u8]> {
    match dtype {
        DType::BF16 => {
            let narrow: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
            Cow::Owned(bytemuck::cast_slice(&narrow).to_vec())
        }
        _ => Cow::Borrowed(bytemuck::cast_slice(values)),
    }
}
