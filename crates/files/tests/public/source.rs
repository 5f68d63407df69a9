//! A source of tensors with bytes of their own.

use files::{Dtype, TensorSource, TensorSpec};
use std::io::{self, Write};

pub struct Tensors {
    specs: Vec<TensorSpec>,
    bytes: Vec<Vec<u8>>,
}

impl Tensors {
    /// Names, types and shapes; the bytes count on from tensor to tensor.
    pub fn new(tensors: &[(&str, Dtype, &[usize])]) -> Self {
        let specs: Vec<_> = tensors
            .iter()
            .map(|&(name, dtype, shape)| TensorSpec {
                name: name.into(),
                dtype,
                shape: shape.into(),
            })
            .collect();
        let bytes = specs.iter().enumerate().map(|(seed, spec)| {
            let bytes = 0..spec.bytes();
            bytes
                .map(|byte| (byte as usize * 7 + seed * 31) as u8)
                .collect()
        });
        Self {
            bytes: bytes.collect(),
            specs,
        }
    }

    pub fn bytes(&self, index: usize) -> &[u8] {
        &self.bytes[index]
    }

    /// Lets a tensor write fewer bytes than it announces.
    pub fn shorten(&mut self, index: usize) {
        self.bytes[index].pop();
    }
}

impl TensorSource for Tensors {
    fn tensors(&self) -> &[TensorSpec] {
        &self.specs
    }

    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
        self.bytes[index]
            .chunks(5)
            .try_for_each(|piece| out.write_all(piece))
    }
}
