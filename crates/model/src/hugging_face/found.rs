//! Finds the tensors of a folder's files that parameters consist of, and widens those that are quantised.

use super::error::WeightsError;
use super::mxfp4::Mxfp4Tensor;
use super::nf4::{Nf4Scales, Nf4Tensor};
use super::wrapper::stored_name;
use crate::parameters::Parameter;
use crate::stored::{FileTensor, Stored};
use files::{Dtype, TensorParts, Tensors, widen};
use memory::Codes;
use std::borrow::Cow;
use std::ops::Range;

/// A tensor of the files that has some elements of a parameter.
#[derive(Debug)]
pub(super) struct FoundTensor {
    pub(super) name: String,
    /// The place of its first element in the parameter.
    pub(super) first: usize,
    pub(super) quantised: Quantised,
}

/// How a tensor of the files is quantised.
#[derive(Debug)]
pub(super) enum Quantised {
    No,
    /// FP8: the tensor with the factors of its blocks.
    Fp8(String),
    /// A whole matrix as products use it, also where others of the family are stored transposed.
    Nf4(Nf4Tensor),
    /// The matrices of all experts as products use them, likewise.
    Mxfp4(Mxfp4Tensor),
}

impl FoundTensor {
    /// The names of all tensors that it consists of.
    pub(super) fn names(&self) -> Vec<String> {
        match &self.quantised {
            Quantised::No => vec![self.name.clone()],
            Quantised::Fp8(scales) => vec![self.name.clone(), scales.clone()],
            Quantised::Nf4(matrix) => matrix.names().collect(),
            Quantised::Mxfp4(matrix) => matrix.names().into(),
        }
    }

    /// How the files have it as codes, if they do.
    pub(super) fn codes(&self) -> Option<Codes> {
        match self.quantised {
            Quantised::No | Quantised::Fp8(_) => None,
            Quantised::Nf4(_) => Some(Codes::Nf4),
            Quantised::Mxfp4(_) => Some(Codes::Mxfp4),
        }
    }

    /// Its elements, to be read as f32.
    pub(super) fn source<'a>(
        &'a self,
        tensors: &'a Tensors,
    ) -> Result<SourceTensor<'a>, WeightsError> {
        let tensor = |name: &str| {
            let tensor = tensors.get(name);
            tensor.expect("it was found when the files were opened")
        };
        let scales = match &self.quantised {
            Quantised::No => Scales::None,
            Quantised::Fp8(name) => {
                let (tensor, mut scales) = (tensor(name), Vec::new());
                let count = tensor.shape.iter().product();
                widen(tensor.dtype, &bytes_of(&tensor, 0..count)?, &mut scales);
                Scales::Fp8(scales)
            }
            Quantised::Nf4(matrix) => Scales::Nf4(matrix.scales(tensors)?),
            Quantised::Mxfp4(matrix) => Scales::Mxfp4(matrix, tensors),
        };
        Ok(SourceTensor {
            tensor: tensor(&self.name),
            scales,
        })
    }
}

/// The head's name in all families. A head that is a parameter of its own is not tied.
pub(super) const HEAD: &str = "lm_head.weight";

/// Rows and columns of a block of an FP8 weight, which share a factor.
const SCALED_BLOCK: usize = 128;

/// The tensors of the files that a parameter consists of, if they have the right shapes and types that can be widened;
/// otherwise the name of one and what is wrong with it. The matrices of experts may also be one tensor.
pub(super) fn find(
    tensors: &Tensors,
    parameter: &Parameter,
) -> Result<Vec<FoundTensor>, (String, String)> {
    let is_whole = matches!(tensors, Tensors::Whole(_));
    if let Some(matrix) = Mxfp4Tensor::find(tensors, parameter)? {
        return Ok(vec![FoundTensor {
            name: matrix.blocks.clone(),
            first: 0,
            quantised: Quantised::Mxfp4(matrix),
        }]);
    }
    let is_one = !is_whole || stored_name(tensors, &parameter.name).is_some();
    let needed = match is_one {
        false => parameter.file_tensors(),
        true if is_whole => vec![parameter.as_one_tensor()],
        true => vec![FileTensor {
            shape: parameter.shape.clone(),
            ..parameter.as_one_tensor()
        }],
    };
    let found = needed.into_iter().map(|needed| {
        let name = needed.name.clone();
        find_tensor(tensors, parameter, needed).map_err(|problem| (name, problem))
    });
    found.collect()
}

/// One tensor of a parameter.
fn find_tensor(
    tensors: &Tensors,
    parameter: &Parameter,
    needed: FileTensor,
) -> Result<FoundTensor, String> {
    let FileTensor { name, shape, first } = needed;
    // GPT-2's own files leave out the first part of the name, `transformer.`. Where Mixtral's experts are one tensor, the
    // router has its newer name too.
    let short = name.strip_prefix("transformer.");
    let newer = name.replace(".block_sparse_moe.", ".mlp.");
    let mut names = [Some(name.as_str()), short, Some(&newer)]
        .into_iter()
        .flatten();
    let found = names.find_map(|name| stored_name(tensors, name));
    let name = &found.ok_or_else(|| missing(&name))?[..];
    let tensor = tensors.get(name).expect("it has just been found");
    if let ([_, _], [_, _]) = (&shape[..], &parameter.shape[..])
        && let Some(matrix) = Nf4Tensor::find(tensors, name, &parameter.shape)?
    {
        if matches!(parameter.stored, Stored::ByHead(_)) {
            return Err("is in NF4, and has its outputs by head, which is not read; give the model's folder in BF16".into());
        }
        return Ok(FoundTensor {
            name: name.into(),
            first,
            quantised: Quantised::Nf4(matrix),
        });
    }
    if tensor.shape != shape {
        return Err(format!(
            "has shape {:?}; the model needs {shape:?}",
            tensor.shape
        ));
    }
    let quantised = match tensor.dtype {
        Dtype::F32 | Dtype::BF16 | Dtype::F16 => Quantised::No,
        Dtype::F8_E4M3 if shape.len() == 2 && parameter.stored != Stored::Transposed => {
            Quantised::Fp8(find_scales(tensors, name, &shape)?)
        }
        other => {
            return Err(format!(
                "holds {other:?}; convert the model to F32, BF16 or F16"
            ));
        }
    };
    Ok(FoundTensor {
        name: name.into(),
        first,
        quantised,
    })
}

/// What is said of a tensor that is not there.
fn missing(name: &str) -> &'static str {
    match name == HEAD {
        true => {
            "is missing; if the embedding is the head too, set \"tie_word_embeddings\" to true in config.json, in its text_config \
             too if it has one"
        }
        false => "is missing",
    }
}

/// The factors of an FP8 weight, as DeepSeek-V3 publishes them: one for each block. Blocks of another power of two that
/// make as many of the weight divide it in the same way, so no `quantization_config` is needed to know them.
fn find_scales(tensors: &Tensors, name: &str, shape: &[usize]) -> Result<String, String> {
    let scales = format!("{name}_scale_inv");
    let blocks: Vec<usize> = shape
        .iter()
        .map(|size| size.div_ceil(SCALED_BLOCK))
        .collect();
    let fits = |tensor: &TensorParts| {
        tensor.shape == blocks && matches!(tensor.dtype, Dtype::F32 | Dtype::BF16)
    };
    match tensors.get(&scales).is_some_and(|tensor| fits(&tensor)) {
        true => Ok(scales),
        false => Err(format!(
            "holds F8_E4M3, and `{scales}` with a factor for each block of {SCALED_BLOCK} x {SCALED_BLOCK} is missing or has \
             another shape or type; convert the model to BF16"
        )),
    }
}

/// A tensor that is read as f32.
pub(super) struct SourceTensor<'a> {
    tensor: TensorParts<'a>,
    scales: Scales<'a>,
}

/// The factors with which the elements of a tensor are widened.
enum Scales<'a> {
    None,
    /// A factor for each block, by rows.
    Fp8(Vec<f32>),
    Nf4(Nf4Scales),
    /// Those of the matrix, among other tensors.
    Mxfp4(&'a Mxfp4Tensor, &'a Tensors),
}

impl SourceTensor<'_> {
    pub(super) fn elements(&self) -> usize {
        match &self.scales {
            Scales::Nf4(scales) => scales.elements,
            Scales::Mxfp4(matrix, _) => matrix.elements(),
            _ => self.tensor.shape.iter().product(),
        }
    }

    /// Some elements, in place of what was in `values`.
    pub(super) fn values(
        &self,
        elements: Range<usize>,
        values: &mut Vec<f32>,
    ) -> Result<(), WeightsError> {
        values.clear();
        match &self.scales {
            Scales::Nf4(scales) => return Ok(scales.values(&self.tensor, elements, values)?),
            Scales::Mxfp4(matrix, tensors) => return matrix.values(tensors, elements, values),
            Scales::None | Scales::Fp8(_) => {}
        }
        let bytes = bytes_of(&self.tensor, elements.clone())?;
        widen(self.tensor.dtype, &bytes, values);
        if let Scales::Fp8(scales) = &self.scales {
            let columns = self.tensor.shape[1];
            let across = columns.div_ceil(SCALED_BLOCK);
            for (value, at) in values.iter_mut().zip(elements) {
                let (row, column) = (at / columns, at % columns);
                *value *= scales[row / SCALED_BLOCK * across + column / SCALED_BLOCK];
            }
        }
        Ok(())
    }
}

/// The bytes of some elements of a tensor, as its files have them.
pub(super) fn bytes_of<'a>(
    tensor: &TensorParts<'a>,
    elements: Range<usize>,
) -> Result<Cow<'a, [u8]>, WeightsError> {
    let size = tensor.dtype.bitsize() / 8;
    Ok(tensor
        .bytes
        .get(elements.start * size..elements.end * size)?)
}
