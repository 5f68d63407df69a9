//! Weights in Hugging Face layout: safetensors, one file or sharded.

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{Device, Tensor};
use half::bf16;
use memory::{DType, Entry, Layout};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Weights could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The folder holds no weights.
    #[error("{0} holds neither model.safetensors nor model.safetensors.index.json")]
    Missing(PathBuf),
    /// A file could not be read.
    #[error("{path}: {source}")]
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

/// Reads every parameter of a layout from a folder, one tensor at a time, as f32, and hands it to `set` with its
/// index. Tensors that the model does not have are ignored.
///
/// # Errors
/// [`WeightsError`], or what `set` returns.
pub fn import<E: From<WeightsError>>(
    folder: &Path,
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
    if let Some((name, _)) = tensors
        .tensors()
        .into_iter()
        .find(|(name, _)| name.ends_with("o_proj.bias"))
    {
        let problem = "is a bias that these models do not have".into();
        return Err(WeightsError::Tensor {
            path: folder.into(),
            name,
            problem,
        }
        .into());
    }
    for (index, entry) in layout.entries().iter().enumerate() {
        set(index, &load(folder, &tensors, entry)?)?;
    }
    Ok(())
}

fn load(
    folder: &Path,
    tensors: &MmapedSafetensors,
    entry: &Entry,
) -> Result<Vec<f32>, WeightsError> {
    let wrong = |problem: String| WeightsError::Tensor {
        path: folder.into(),
        name: entry.name.clone(),
        problem,
    };
    let tensor = tensors
        .load(&entry.name, &Device::Cpu)
        .map_err(|_| wrong("is missing".into()))?;
    if tensor.dims() != entry.shape {
        return Err(wrong(format!(
            "has shape {:?}; the model needs {:?}",
            tensor.dims(),
            entry.shape
        )));
    }
    let flat = |tensor: Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    flat(tensor).map_err(|source| WeightsError::Read {
        path: folder.into(),
        source,
    })
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

/// Writes tensors of a layout to one safetensors file. `bytes(index)` are the tensor's little-endian elements.
///
/// # Errors
/// [`WeightsError::Write`].
pub fn export(
    path: &Path,
    layout: &Layout,
    dtype: DType,
    bytes: impl Fn(usize) -> Vec<u8>,
) -> Result<(), WeightsError> {
    let write = |source| WeightsError::Write {
        path: path.to_path_buf(),
        source,
    };
    let dtype = if dtype == DType::BF16 {
        Dtype::BF16
    } else {
        Dtype::F32
    };
    let data: Vec<Vec<u8>> = (0..layout.entries().len()).map(bytes).collect();
    let views = layout.entries().iter().zip(&data).map(|(entry, data)| {
        TensorView::new(dtype, entry.shape.clone(), data).map(|view| (entry.name.as_str(), view))
    });
    let views: Vec<_> = views.collect::<Result<_, _>>().map_err(write)?;
    let metadata = [("format".to_string(), "pt".to_string())].into();
    serialize_to_file(views, Some(metadata), path).map_err(write)
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
