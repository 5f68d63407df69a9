//! Codes of 8 and 4 bits, to the bit: in f64, every product and sum rounded to f32 by itself.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor};
use crate::host::Host;
use half::bf16;
use kernels::quantise::SIGNED;
use kernels::{DequantiseBytes, DequantiseMxfp4, DequantiseNf4, KernelError};
use memory::{Codes, DType};

/// The quantiles of the normal distribution that the authors of QLoRA publish.
const NF4: [f64; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

/// The magnitudes of numbers of 4 bits, as the OCP's specification of MX formats lists them.
const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

#[derive(Debug)]
struct Dequantise {
    kind: Codes,
    dtype: DType,
    elements: usize,
    seed: u64,
}

impl Dequantise {
    fn bytes(&self, count: usize, seed: u64) -> Host {
        let ids = Host::random_ids(count, 256, self.seed + seed).values();
        Host::new(DType::U8, [count], ids)
    }

    /// Codes, `absmax`, and of NF4 the codes of `absmax` and the offset; of MXFP4 codes and exponents.
    fn tensors(&self) -> Vec<Host> {
        let absmax = |blocks: usize| Host::random(DType::F32, [blocks], 0.1, self.seed);
        let n = self.elements;
        match self.kind {
            Codes::EightBit => vec![self.bytes(n, 1), absmax(n.div_ceil(256))],
            Codes::Mxfp4 => {
                let blocks = n.div_ceil(32);
                // The least and the most that a block has, then any.
                let exponents = self.bytes(blocks, 2).values().into_iter().enumerate();
                let exponent = |(block, any): (usize, f64)| match block % 7 {
                    0 => 127.0,
                    1 => 0.0,
                    2 => 1.0,
                    3 => 2.0,
                    4 => 252.0,
                    _ => any.min(252.0),
                };
                let exponents: Vec<f64> = exponents.map(exponent).collect();
                vec![
                    self.bytes(n.div_ceil(2), 1),
                    Host::new(DType::U8, [blocks], exponents),
                ]
            }
            Codes::Nf4 => {
                let blocks = n.div_ceil(64);
                vec![
                    self.bytes(n.div_ceil(2), 1),
                    absmax(blocks.div_ceil(256)),
                    self.bytes(blocks, 2),
                    Host::random(DType::F32, [1], 0.3, self.seed + 3),
                ]
            }
        }
    }

    /// The value of an element, from the values of [`Dequantise::tensors`].
    fn value(&self, tensors: &[Vec<f64>], at: usize) -> f64 {
        let f32_of = |x: f64| f64::from(x as f32);
        let entry = |code: f64| f64::from(SIGNED.values[code as usize]);
        let value = match self.kind {
            Codes::EightBit => f32_of(entry(tensors[0][at]) * tensors[1][at / 256]),
            Codes::Mxfp4 => {
                let byte = tensors[0][at / 2] as usize;
                let code = [byte % 16, byte / 16][at % 2];
                let value = E2M1[code % 8] * (tensors[1][at / 32] - 127.0).exp2();
                if code < 8 { value } else { -value }
            }
            Codes::Nf4 => {
                let byte = tensors[0][at / 2] as usize;
                let code = [byte / 16, byte % 16][at % 2];
                let block = at / 64;
                let scale = f32_of(entry(tensors[2][block]) * tensors[1][block / 256]);
                f32_of(f32_of(NF4[code]) * f32_of(scale + tensors[3][0]))
            }
        };
        match self.dtype {
            DType::BF16 => bf16::from_f32(value as f32).to_f64(),
            _ => value,
        }
    }
}

impl Case for Dequantise {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let tensors = self.tensors();
        let tensors: Vec<Tensor> = tensors.iter().map(|host| device.put(host)).collect();
        let mut out = device.room(self.dtype, [self.elements]);
        match (&tensors[..], self.kind) {
            ([codes, exponents], Codes::Mxfp4) => device.run(DequantiseMxfp4 {
                out: out.view_mut(),
                codes: codes.view(),
                exponents: exponents.view(),
            }),
            ([codes, absmax, absmax_codes, offset], _) => device.run(DequantiseNf4 {
                out: out.view_mut(),
                codes: codes.view(),
                absmax_codes: absmax_codes.view(),
                absmax: absmax.view(),
                offset: offset.view(),
            }),
            (tensors, _) => device.run(DequantiseBytes {
                out: out.view_mut(),
                codes: tensors[0].view(),
                absmax: tensors[1].view(),
            }),
        }?;
        Ok(vec![device.take(&out)])
    }

    fn expected(&self) -> Vec<Expected> {
        let tensors: Vec<Vec<f64>> = self.tensors().iter().map(Host::values).collect();
        let values = (0..self.elements).map(|at| self.value(&tensors, at));
        let name = match self.kind {
            Codes::Nf4 => "dequantise_nf4",
            Codes::EightBit => "dequantise_bytes",
            Codes::Mxfp4 => "dequantise_mxfp4",
        };
        vec![Expected::new(name, values.collect(), Rule::Exact)]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    // An element, part of a block, a thread's share, blocks and a rest, more than one task's and than one block of `absmax`.
    let sizes = [1, 37, 64, 256, 1001, 40_003];
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (seed, elements) in (6000..).zip(sizes) {
        for kind in [Codes::EightBit, Codes::Nf4, Codes::Mxfp4] {
            cases.push(Box::new(Dequantise {
                kind,
                dtype,
                elements,
                seed,
            }));
        }
    }
    cases
}
