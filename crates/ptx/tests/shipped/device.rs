//! Tensors on an interpreter.

use kernels::Kernels;
use kernels::cuda::Cuda;
use memory::{Buffer, Category, DType, Dims, Memory};
use ptx::{Interpreter, PtxTexts};
use std::rc::Rc;
use std::sync::Arc;

/// An interpreter of some texts, with its memory.
pub struct Device {
    pub dtype: DType,
    pub memory: Memory,
    pub kernels: Kernels<Cuda<Interpreter>>,
}

impl Device {
    pub fn new(sources: &Arc<PtxTexts>, dtype: DType) -> Device {
        let interpreter = Interpreter::new(sources);
        let memory = Memory::device(Rc::new(interpreter.clone()));
        memory.set_poison(true);
        let kernels = Cuda::new(interpreter, &memory, dtype).unwrap();
        Device {
            dtype,
            memory,
            kernels,
        }
    }
}

/// A tensor that nobody wrote.
pub fn room(device: &Device, dtype: DType, dims: impl Into<Dims>) -> Buffer {
    device
        .memory
        .lease(Category::Temporary, "tensor", dims.into(), dtype)
        .unwrap()
}

/// A tensor with these values, which its type has.
pub fn put(device: &Device, dims: impl Into<Dims>, values: &[f32]) -> Buffer {
    let mut tensor = room(device, device.dtype, dims);
    let bits = values.iter().map(|value| value.to_bits());
    let bytes: Vec<u8> = match device.dtype {
        DType::F32 => bits.flat_map(u32::to_le_bytes).collect(),
        _ => bits
            .flat_map(|bits| ((bits >> 16) as u16).to_le_bytes())
            .collect(),
    };
    device.kernels.upload(tensor.view_mut(), &bytes).unwrap();
    tensor
}

/// A tensor's values.
pub fn take(device: &Device, tensor: &Buffer) -> Vec<f32> {
    let mut bytes = vec![0; tensor.view().bytes()];
    device.kernels.download(&mut bytes, tensor.view()).unwrap();
    match tensor.dtype() {
        DType::F32 => bytes
            .as_chunks()
            .0
            .iter()
            .copied()
            .map(f32::from_le_bytes)
            .collect(),
        _ => {
            let halves = bytes.as_chunks().0.iter().copied().map(u16::from_le_bytes);
            halves
                .map(|half| f32::from_bits(u32::from(half) << 16))
                .collect()
        }
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
    // A NaN is infinitely wrong.
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
