//! Host data: what is uploaded and what comes back.

use half::bf16;
use kernels::fp8::Fp8;
use memory::{DType, Dims};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A row-major tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    pub dtype: DType,
    pub dims: Dims,
    pub bytes: Vec<u8>,
}

impl Host {
    /// Values rounded to a type.
    pub fn new(dtype: DType, dims: impl Into<Dims>, values: impl IntoIterator<Item = f64>) -> Host {
        let dims = dims.into();
        let mut bytes = Vec::with_capacity(dims.elements() * dtype.size_in_bytes());
        for value in values {
            match dtype {
                DType::F64 => bytes.extend(value.to_ne_bytes()),
                DType::F32 => bytes.extend((value as f32).to_ne_bytes()),
                DType::BF16 => bytes.extend(bf16::from_f64(value).to_ne_bytes()),
                DType::I32 => bytes.extend((value as i32).to_ne_bytes()),
                DType::I16 => bytes.extend((value as i16).to_ne_bytes()),
                DType::U32 => bytes.extend((value as u32).to_ne_bytes()),
                DType::U8 => bytes.push(value as u8),
                DType::F8E4M3 => bytes.push(Fp8::E4m3.code(value as f32)),
                DType::F8E5M2 => bytes.push(Fp8::E5m2.code(value as f32)),
            }
        }
        assert_eq!(bytes.len(), dims.elements() * dtype.size_in_bytes());
        Host { dtype, dims, bytes }
    }

    /// Uniform values between `-range` and `range`.
    pub fn random(dtype: DType, dims: impl Into<Dims>, range: f64, seed: u64) -> Host {
        let dims = dims.into();
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let values = (0..dims.elements()).map(|_| random.random_range(-range..range));
        Host::new(dtype, dims, values)
    }

    /// Uniform integers below `bound`.
    pub fn random_ids(count: usize, bound: usize, seed: u64) -> Host {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let ids = (0..count).map(|_| random.random_range(0..bound) as f64);
        Host::new(DType::I32, [count], ids)
    }

    /// Exactly the values that the tensor holds.
    pub fn values(&self) -> Vec<f64> {
        let elements = self.bytes.chunks_exact(self.dtype.size_in_bytes());
        let value = |bytes: &[u8]| match self.dtype {
            DType::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()),
            DType::F32 => f64::from(f32::from_ne_bytes(bytes.try_into().unwrap())),
            DType::BF16 => bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f64(),
            DType::I32 => f64::from(i32::from_ne_bytes(bytes.try_into().unwrap())),
            DType::I16 => f64::from(i16::from_ne_bytes(bytes.try_into().unwrap())),
            DType::U32 => f64::from(u32::from_ne_bytes(bytes.try_into().unwrap())),
            DType::U8 => f64::from(bytes[0]),
            DType::F8E4M3 => f64::from(Fp8::E4m3.value(bytes[0])),
            DType::F8E5M2 => f64::from(Fp8::E5m2.value(bytes[0])),
        };
        elements.map(value).collect()
    }
}
