//! Tensors on an interpreter.

use kernels::Kernels;
use kernels::cuda::Cuda;
use memory::{Buffer, Category, DType, Dims, Memory};
use ptx::{Interpreter, PtxTexts};
use std::rc::Rc;
use std::sync::Arc;

/// An interpreter of some texts, with its memory.
pub struct Device {
    pub memory: Memory,
    pub kernels: Cuda<Interpreter>,
}

impl Device {
    pub fn new(sources: &Arc<PtxTexts>, dtype: DType) -> Device {
        let interpreter = Interpreter::new(sources);
        let memory = Memory::device(Rc::new(interpreter.clone()));
        memory.set_poison(true);
        let kernels = Cuda::new(interpreter, &memory, dtype).unwrap();
        Device { memory, kernels }
    }
}

/// A tensor that nobody wrote.
pub fn room(memory: &Memory, dtype: DType, dims: impl Into<Dims>) -> Buffer {
    memory
        .lease(Category::Temporary, "tensor", dims.into(), dtype)
        .unwrap()
}

/// A tensor with these bytes.
pub fn put_bytes(
    kernels: &Kernels,
    memory: &Memory,
    dtype: DType,
    dims: impl Into<Dims>,
    bytes: &[u8],
) -> Buffer {
    let mut tensor = room(memory, dtype, dims);
    kernels.upload(tensor.view_mut(), bytes).unwrap();
    tensor
}

/// A tensor with these values, which its type has.
pub fn put(
    kernels: &Kernels,
    memory: &Memory,
    dtype: DType,
    dims: impl Into<Dims>,
    values: &[f32],
) -> Buffer {
    let bytes: Vec<u8> = match dtype {
        DType::F32 => values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
        DType::BF16 => values
            .iter()
            .flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes())
            .collect(),
        _ => values
            .iter()
            .flat_map(|value| (*value as i32).to_le_bytes())
            .collect(),
    };
    put_bytes(kernels, memory, dtype, dims, &bytes)
}

/// A tensor's bytes.
pub fn take_bytes(kernels: &Kernels, tensor: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; tensor.dims().elements() * tensor.dtype().size_in_bytes()];
    kernels.download(&mut bytes, tensor.view()).unwrap();
    bytes
}

/// A tensor's values.
pub fn take(kernels: &Kernels, tensor: &Buffer) -> Vec<f32> {
    let bytes = take_bytes(kernels, tensor);
    match tensor.dtype() {
        DType::F32 => bytes
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
            .collect(),
        _ => bytes
            .chunks_exact(2)
            .map(|bytes| f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16))
            .collect(),
    }
}

/// Numbers that look random, of up to `range`, which bf16 holds.
pub fn numbers(count: usize, range: f32, seed: u32) -> Vec<f32> {
    let number = |index: usize| {
        let mixed = (index as u32 + 1).wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(0x9e37_79b9);
        let mixed = (mixed ^ mixed >> 15).wrapping_mul(0x2c1b_3c6d) >> 8;
        let value = (mixed as f32 / (1 << 23) as f32 - 1.0) * range;
        f32::from_bits(value.to_bits() & 0xffff_0000)
    };
    (0..count).map(number).collect()
}

/// The largest difference between values and what is expected of them, as a share of the largest that is expected.
pub fn worst(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected
        .iter()
        .fold(0f64, |largest, value| largest.max(value.abs()));
    let differences = found
        .iter()
        .zip(expected)
        .map(|(found, expected)| (f64::from(*found) - expected).abs());
    // What is no number is infinitely wrong.
    differences.fold(0f64, |worst, difference| {
        if difference <= worst {
            worst
        } else if difference.is_nan() {
            f64::INFINITY
        } else {
            difference
        }
    }) / largest
}
