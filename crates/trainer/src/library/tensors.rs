//! Converts between candle's tensors and what sessions take and return.

use super::token_rows::TokenRows;
use crate::failure::{Failure, Result};
use candle_core::{DType, Device, Tensor};
use data::MASKED;
use model::{MatrixOrder, Parameter, Transposition};
use session::NamedStateCopy;
use settings::Config;

/// A step's tokens, as tensors of exactly the planned size.
pub(super) fn rows(config: &Config, ids: &Tensor, targets: &Tensor) -> Result<TokenRows> {
    for (tensor, name) in [(ids, "ids"), (targets, "targets")] {
        check_shape(config, tensor, name)?;
    }
    if ids.dims() != targets.dims() {
        return Err(Failure::Usage(format!(
            "`ids` are {:?} and `targets` {:?}; every id has a target, which may be {MASKED}",
            ids.dims(),
            targets.dims()
        )));
    }
    Ok(TokenRows {
        dims: [ids.dims()[0], ids.dims()[1]],
        ids: tokens(ids, "ids")?,
        targets: tokens(targets, "targets")?,
        positions: None,
    })
}

/// Refuses a shape that the run was not planned for.
fn check_shape(config: &Config, tensor: &Tensor, name: &str) -> Result {
    let (micro, accum, seq) = (config.batch.micro, config.batch.accum, config.data.seq);
    let fits = match *tensor.dims() {
        [rows, width] => width == seq && rows > 0 && rows % micro == 0 && rows / micro <= accum,
        _ => false,
    };
    if fits {
        return Ok(());
    }
    let rows = match accum {
        1 => micro.to_string(),
        _ => format!("{micro} for each of up to {accum} micro-batches"),
    };
    Err(Failure::Usage(format!(
        "`{name}` are {:?}; this trainer takes [rows, {seq}], with rows {rows}: set batch.micro, batch.accum and data.seq for \
         others",
        tensor.dims()
    )))
}

/// The elements of a tensor of whole numbers.
fn tokens(tensor: &Tensor, name: &str) -> Result<Vec<i64>> {
    if !tensor.dtype().is_int() {
        return Err(Failure::Usage(format!(
            "`{name}` are {:?}; tokens are whole numbers: to_dtype(DType::I64) makes them",
            tensor.dtype()
        )));
    }
    elements(tensor, DType::I64, name)
}

/// All elements of a tensor on any device, converted to a type.
fn elements<T: candle_core::WithDType>(
    tensor: &Tensor,
    dtype: DType,
    name: &str,
) -> Result<Vec<T>> {
    let converted = tensor
        .to_device(&Device::Cpu)
        .and_then(|tensor| tensor.to_dtype(dtype));
    let flat = converted.and_then(|tensor| tensor.flatten_all());
    flat.and_then(|tensor| tensor.to_vec1())
        .map_err(unreadable(name))
}

fn unreadable(name: &str) -> impl FnOnce(candle_core::Error) -> Failure {
    move |error| Failure::Usage(format!("candle cannot read `{name}`: {error}"))
}

/// A parameter's values, converted from the shape in which they are used to that in files.
pub(super) fn in_files_shape(values: Vec<f32>, parameter: &Parameter) -> Result<Tensor> {
    let tensor = Tensor::from_vec(values, parameter.shape.as_slice(), &Device::Cpu);
    tensor
        .and_then(|tensor| as_in_files(tensor, parameter))
        .map_err(unreadable(&parameter.name))
}

/// The values of a parameter's tensor of f32, row by row.
pub(super) fn values(tensor: &Tensor, parameter: &Parameter) -> Result<Vec<f32>> {
    elements(tensor, DType::F32, &parameter.name)
}

/// A parameter's tensor, moved to a device.
pub(super) fn moved(tensor: Tensor, device: &Device, parameter: &Parameter) -> Result<Tensor> {
    tensor
        .to_device(device)
        .map_err(unreadable(&parameter.name))
}

/// A state in the shape of the parameter in files; flat if it does not have one value for each of the parameter's.
pub(super) fn state(state: NamedStateCopy, parameter: &Parameter) -> Result<Tensor> {
    let elements = state.bytes.len() / state.dtype.size_in_bytes();
    let is_value =
        elements == parameter.shape.iter().product::<usize>() && state.dtype != memory::DType::U8;
    let build = |shape: &[usize]| {
        Tensor::from_raw_buffer(&state.bytes, dtype_of(state.dtype), shape, &Device::Cpu)
    };
    let tensor = match is_value {
        true => build(&parameter.shape).and_then(|tensor| as_in_files(tensor, parameter)),
        false => build(&[elements]),
    };
    tensor.map_err(unreadable(&state.name))
}

/// The same type in candle.
fn dtype_of(dtype: memory::DType) -> DType {
    match dtype {
        memory::DType::U8 | memory::DType::F8E5M2 => DType::U8,
        memory::DType::F8E4M3 => DType::F8E4M3,
        memory::DType::U32 => DType::U32,
        memory::DType::I16 => DType::I16,
        memory::DType::I32 => DType::I32,
        memory::DType::BF16 => DType::BF16,
        memory::DType::F32 => DType::F32,
        memory::DType::F64 => DType::F64,
    }
}

/// The values of a tensor in the shape of files, converted to the shape in which they are used.
pub(super) fn values_of(tensor: &Tensor, parameter: &Parameter) -> Result<Vec<f32>> {
    let (name, shape) = (&parameter.name, parameter.stored_shape());
    if tensor.dims() != shape || !tensor.dtype().is_float() {
        return Err(Failure::Usage(format!(
            "`{name}` is set to {:?} of {:?}; it takes floats of {shape:?}",
            tensor.dims(),
            tensor.dtype()
        )));
    }
    let used = as_used(tensor.clone(), parameter).map_err(unreadable(name))?;
    elements(&used, DType::F32, name)
}

/// A parameter as files have it.
fn as_in_files(tensor: Tensor, parameter: &Parameter) -> candle_core::Result<Tensor> {
    let tensor = match parameter.turned() {
        None => tensor,
        Some(of) => turned(&tensor, of)?,
    };
    tensor.reshape(parameter.stored_shape())
}

/// The elements of a parameter as files have it, in the order of their use.
fn as_used(tensor: Tensor, parameter: &Parameter) -> candle_core::Result<Tensor> {
    match parameter.turned() {
        None => Ok(tensor),
        Some(of) => turned(&tensor, of.reversed()),
    }
}

fn turned(tensor: &Tensor, of: Transposition) -> candle_core::Result<Tensor> {
    let sizes = [&[of.matrices][..], &of.rows, &of.columns].concat();
    let swapped = [0, 5, 4, 6, 2, 1, 3];
    let turned = tensor.reshape(sizes)?.permute(swapped.as_slice())?;
    if of.order == MatrixOrder::Same {
        return turned.contiguous();
    }
    let places = (0..of.matrices).map(|matrix| of.place_in_memory(matrix) as u32);
    let places = Tensor::from_iter(places, tensor.device())?;
    turned
        .contiguous()?
        .flatten_from(1)?
        .index_select(&places, 0)
}
