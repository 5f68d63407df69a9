//! Matrices in NF4 as bitsandbytes saves them. Beside the codes of `X.weight` are `X.weight.absmax`, `nested_absmax`, the two
//! maps, and `quant_state.bitsandbytes__nf4`, which is JSON.

use files::{CHUNK_BYTES, Dtype, FilesError, TensorParts, Tensors, widen};
use kernels::quantise::{BlockScale, NF4, SIGNED, dequantise_block};
use memory::{CodePlaces, Codes};
use serde_json::Value;
use std::borrow::Cow;
use std::ops::Range;

/// The ends of the names of the tensors beside the codes, in the order in which they are looked for.
const ABSMAX: &str = "absmax";
const NESTED_ABSMAX: &str = "nested_absmax";
const MAP: &str = "quant_map";
const NESTED_MAP: &str = "nested_quant_map";
const STATE: &str = "quant_state.bitsandbytes__";

/// The relative difference that is allowed between our maps and a folder's: versions of bitsandbytes round them differently.
const MAP_TOLERANCE: f32 = 1e-6;

/// The most bytes of a matrix's JSON.
const STATE_BYTES_MAX: usize = 1 << 16;

/// A matrix of the files in NF4, whose `absmax` are codes themselves.
#[derive(Debug)]
pub(super) struct Nf4Tensor {
    /// `X.weight`.
    name: String,
    offset: f32,
    elements: usize,
}

/// The scales of a matrix, which its values are computed with.
pub(super) struct Nf4Scales {
    absmax_codes: Vec<u8>,
    absmax: Vec<f32>,
    offset: f32,
    /// Elements of the matrix.
    pub(super) elements: usize,
}

impl Nf4Tensor {
    /// Finds the matrix of this name in NF4, of shape `[outputs, inputs]`; none if it is not quantised.
    ///
    /// # Errors
    /// Says what is wrong with it, for a message that names the tensor.
    pub(super) fn find(
        tensors: &Tensors,
        name: &str,
        shape: &[usize],
    ) -> Result<Option<Nf4Tensor>, String> {
        refuse_others(tensors, name)?;
        let Some(state) = tensors.get(&format!("{name}.{STATE}nf4")) else {
            return Ok(None);
        };
        let state = read_state(&state)?;
        let size = |key: &str| state[key].as_u64();
        for (key, expected) in [
            ("blocksize", Codes::NF4_BLOCK),
            ("nested_blocksize", Codes::BLOCK),
        ] {
            if size(key) != Some(expected as u64) {
                return Err(format!(
                    "is in NF4 with `{key}` {}; only {expected} is read: give the model's folder in BF16",
                    state[key]
                ));
            }
        }
        if state["shape"] != serde_json::json!(shape) {
            return Err(format!(
                "has shape {}; the model needs {shape:?}",
                state["shape"]
            ));
        }
        let offset = state["nested_offset"].as_f64().map(|offset| offset as f32);
        let offset = offset.filter(|offset| offset.is_finite());
        let found = Nf4Tensor {
            name: name.into(),
            offset: offset.ok_or("is in NF4, and its `nested_offset` is no number")?,
            elements: shape.iter().product(),
        };
        found.check(tensors)?;
        Ok(Some(found))
    }

    /// Refuses tensors beside the codes that are missing, or not as large as those of the matrix have to be.
    fn check(&self, tensors: &Tensors) -> Result<(), String> {
        let CodePlaces {
            codes,
            absmax_codes,
            absmax,
            ..
        } = self.places();
        let codes_found = tensors.get(&self.name).map(|tensor| tensor.bytes.len());
        if codes_found != Some(codes.len()) {
            let found = codes_found.unwrap_or_default();
            return Err(format!(
                "has {found} bytes; in NF4 the model needs {}",
                codes.len()
            ));
        }
        let f32s = size_of::<f32>();
        for (end, dtype, bytes) in [
            (ABSMAX, Dtype::U8, absmax_codes.len()),
            (NESTED_ABSMAX, Dtype::F32, absmax.len()),
            (MAP, Dtype::F32, NF4.len() * f32s),
            (NESTED_MAP, Dtype::F32, SIGNED.values.len() * f32s),
        ] {
            let tensor = tensors.get(&self.of(end));
            let is_it = |tensor: &TensorParts| tensor.dtype == dtype && tensor.bytes.len() == bytes;
            if !tensor.is_some_and(|tensor| is_it(&tensor)) {
                return Err(format!(
                    "is in NF4, and `{}` with {bytes} bytes of {dtype:?} is missing or has another type or size",
                    self.of(end)
                ));
            }
        }
        for (end, map) in [(MAP, &NF4[..]), (NESTED_MAP, &SIGNED.values)] {
            let found = self.floats(tensors, end);
            let found = found.map_err(|error| error.to_string())?;
            let far = |(own, theirs): (&f32, &f32)| {
                let is_near = (own - theirs).abs() <= MAP_TOLERANCE * own.abs();
                !is_near
            };
            if map.iter().zip(&found).any(far) {
                return Err(format!(
                    "is in NF4, and `{}` has other values than bitsandbytes gives codes; give the model's folder in BF16",
                    self.of(end)
                ));
            }
        }
        Ok(())
    }

    fn of(&self, end: &str) -> String {
        format!("{}.{end}", self.name)
    }

    /// The names of its tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        let beside = [ABSMAX, NESTED_ABSMAX, MAP, NESTED_MAP];
        let beside = beside.map(|end| self.of(end)).into_iter();
        let state = self.of(&format!("{STATE}nf4"));
        [self.name.clone()].into_iter().chain(beside).chain([state])
    }

    fn places(&self) -> CodePlaces {
        Codes::Nf4.places(self.elements)
    }

    /// The parts of the matrix in chunks, as [`Codes::places`] has them: the first byte, and bytes.
    pub(super) fn parts<'t>(
        &self,
        tensors: &'t Tensors,
    ) -> impl Iterator<Item = Result<(usize, Cow<'t, [u8]>), FilesError>> {
        let CodePlaces {
            codes,
            absmax_codes,
            absmax,
            offset,
            ..
        } = self.places();
        let stored = [
            (self.name.clone(), codes),
            (self.of(ABSMAX), absmax_codes),
            (self.of(NESTED_ABSMAX), absmax),
        ];
        let chunks = stored.into_iter().flat_map(move |(name, place)| {
            let tensor = tensors.get(&name).expect("it was found");
            let firsts = (0..place.len()).step_by(CHUNK_BYTES);
            firsts.map(move |first| {
                let chunk = first..place.len().min(first + CHUNK_BYTES);
                Ok((place.start + first, tensor.bytes.get(chunk)?))
            })
        });
        let own = self.offset.to_le_bytes().to_vec();
        chunks.chain([Ok((offset.start, Cow::Owned(own)))])
    }

    /// Reads its scales.
    pub(super) fn scales(&self, tensors: &Tensors) -> Result<Nf4Scales, FilesError> {
        let codes = tensors.get(&self.of(ABSMAX)).expect("it was found");
        Ok(Nf4Scales {
            absmax_codes: codes.bytes.get(0..codes.bytes.len())?.into_owned(),
            absmax: self.floats(tensors, NESTED_ABSMAX)?,
            offset: self.offset,
            elements: self.elements,
        })
    }

    fn floats(&self, tensors: &Tensors, end: &str) -> Result<Vec<f32>, FilesError> {
        let tensor = tensors.get(&self.of(end)).expect("it was found");
        let mut values = Vec::new();
        let bytes = tensor.bytes.get(0..tensor.bytes.len())?;
        widen(Dtype::F32, &bytes, &mut values);
        Ok(values)
    }
}

impl Nf4Scales {
    /// Values of the matrix behind those in `values`, from its codes.
    pub(super) fn values(
        &self,
        tensor: &TensorParts,
        elements: Range<usize>,
        values: &mut Vec<f32>,
    ) -> Result<(), FilesError> {
        let (block, block_bytes) = Codes::Nf4.block();
        let blocks = elements.start / block..elements.end.div_ceil(block);
        let end = tensor.bytes.len().min(blocks.end * block_bytes);
        let codes: Cow<[u8]> = tensor.bytes.get(blocks.start * block_bytes..end)?;
        let mut of_block = [0.0; Codes::NF4_BLOCK];
        for (number, bytes) in blocks.zip(codes.chunks(block_bytes)) {
            let first = number * block;
            let own = &mut of_block[..block.min(self.elements - first)];
            let scale = BlockScale::Coded {
                code: self.absmax_codes[number],
                absmax: self.absmax[number / Codes::BLOCK],
                offset: self.offset,
            };
            dequantise_block(bytes, scale, own);
            let wanted = elements.start.max(first)..elements.end.min(first + own.len());
            values.extend(&own[wanted.start - first..wanted.end - first]);
        }
        Ok(())
    }
}

/// Refuses a matrix that was quantised in another way, by that way's name.
fn refuse_others(tensors: &Tensors, name: &str) -> Result<(), String> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let is_there = |name: String| tensors.get(&name).is_some();
    let refused = match () {
        () if is_there(format!("{name}.{STATE}fp4")) => "FP4",
        () if is_there(format!("{module}.SCB")) => "8 bits by LLM.int8",
        () if is_there(format!("{name}.{ABSMAX}")) && !is_nested(tensors, name) => {
            "NF4 whose `absmax` are not quantised (bnb_4bit_use_double_quant is off)"
        }
        () => return Ok(()),
    };
    Err(format!(
        "is in {refused}, which is not read; give the model's folder in BF16, and --base-dtype nf4 or 8bit"
    ))
}

fn is_nested(tensors: &Tensors, name: &str) -> bool {
    tensors.get(&format!("{name}.{NESTED_ABSMAX}")).is_some()
}

/// The JSON beside the codes.
fn read_state(tensor: &TensorParts) -> Result<Value, String> {
    let wrong = |reason: String| format!("is in NF4, and its `quant_state` is no JSON: {reason}");
    let bytes = tensor.bytes.len();
    if bytes > STATE_BYTES_MAX {
        return Err(wrong(format!("it has {bytes} bytes")));
    }
    let text = tensor.bytes.get(0..bytes);
    let text = text.map_err(|error| error.to_string())?;
    serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))
}
