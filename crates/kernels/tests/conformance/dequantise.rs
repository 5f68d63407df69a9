//! Codes of 8 and 4 bits, to the bit: in f64, every product and sum rounded to f32 by itself.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor};
use crate::host::Host;
use half::bf16;
use kernels::quantise::SIGNED;
use kernels::{DequantiseBytes, DequantiseNf4, KernelError};
use memory::DType;

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

#[derive(Debug)]
struct Dequantise {
    is_nf4: bool,
    dtype: DType,
    elements: usize,
    seed: u64,
}

impl Dequantise {
    fn bytes(&self, count: usize, seed: u64) -> Host {
        let ids = Host::random_ids(count, 256, self.seed + seed).values();
        Host::new(DType::U8, [count], ids)
    }

    /// Codes, `absmax`, and of 4-bit codes the codes of `absmax` and the offset.
    fn tensors(&self) -> Vec<Host> {
        let absmax = |blocks: usize| Host::random(DType::F32, [blocks], 0.1, self.seed);
        let n = self.elements;
        match self.is_nf4 {
            false => vec![self.bytes(n, 1), absmax(n.div_ceil(256))],
            true => {
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
        let value = match self.is_nf4 {
            false => f32_of(entry(tensors[0][at]) * tensors[1][at / 256]),
            true => {
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
        match &tensors[..] {
            [codes, absmax, absmax_codes, offset] => device.run(DequantiseNf4 {
                out: out.view_mut(),
                codes: codes.view(),
                absmax_codes: absmax_codes.view(),
                absmax: absmax.view(),
                offset: offset.view(),
            }),
            tensors => device.run(DequantiseBytes {
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
        let name = match self.is_nf4 {
            true => "dequantise_nf4",
            false => "dequantise_bytes",
        };
        vec![Expected::new(name, values.collect(), Rule::Exact)]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    // An element, part of a block, a thread's share, blocks and a rest, more than one task's and than one block of `absmax`.
    let sizes = [1, 37, 64, 256, 1001, 40_003];
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (seed, elements) in (6000..).zip(sizes) {
        for is_nf4 in [false, true] {
            cases.push(Box::new(Dequantise {
                is_nf4,
                dtype,
                elements,
                seed,
            }));
        }
    }
    cases
}
