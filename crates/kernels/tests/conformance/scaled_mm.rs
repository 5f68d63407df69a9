//! Products of codes against `torch._scaled_mm` (`golden/torch/README.md`): where all sums are exact in f32, to the bit.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, by_instructions};
use crate::fp8::on_tensor_cores;
use crate::host::Host;
use kernels::cpu::Instructions;
use kernels::fp8::Fp8;
use kernels::{Init, KernelError, ScaledMatmul, Target};
use memory::DType;
use serde_json::Value;

const GOLDEN: &str = include_str!("../golden/torch/scaled_mm.json");

/// What can be done wrong in a product of codes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    /// The first scale is twice what it should be.
    DoubleScale,
    /// The codes of `b` are read as if they lay in the order of its transpose.
    NotTransposed,
    /// The codes of `a` are taken for those of the other format.
    OtherFormat,
    /// What is to be added is not.
    NoBias,
}

#[derive(Clone, Debug)]
struct Reference {
    of: Value,
    out: DType,
    mistake: Option<Mistake>,
}

/// Numbers of 32 bits that look random, by their places; as in `benches/peers/scaled_mm_reference.py`.
fn hashed(count: usize, seed: usize) -> impl Iterator<Item = u32> {
    (0..count).map(move |at| {
        let mut bits = ((at + (seed << 20)) as u32).wrapping_mul(2_654_435_761);
        bits ^= bits >> 15;
        bits = bits.wrapping_mul(2_246_822_519);
        bits ^ bits >> 13
    })
}

impl Reference {
    /// All products, with results of both types.
    fn all() -> Vec<Reference> {
        let golden: Value = serde_json::from_str(GOLDEN).unwrap();
        let products = golden["products"].as_array().unwrap().iter();
        let both = |of: &Value| {
            [DType::F32, DType::BF16].map(|out| Reference {
                of: of.clone(),
                out,
                mistake: None,
            })
        };
        products.flat_map(both).collect()
    }

    fn whole(&self, key: &str, index: usize) -> i64 {
        self.of[key][index].as_i64().unwrap()
    }

    /// m, k, n.
    fn sizes(&self) -> [usize; 3] {
        [0, 1, 2].map(|index| self.whole("sizes", index) as usize)
    }

    fn is_exact(&self) -> bool {
        self.of["exact"].as_bool().unwrap()
    }

    fn has_bias(&self) -> bool {
        !self.of["bias"].is_null()
    }

    fn seed(&self) -> usize {
        3 * self.of["seed"].as_u64().unwrap() as usize
    }

    fn format(&self, operand: usize) -> Fp8 {
        match self.of["formats"][operand].as_str().unwrap() {
            "e4m3" => Fp8::E4m3,
            _ => Fp8::E5m2,
        }
    }

    /// Codes of an operand.
    fn codes(&self, operand: usize) -> Host {
        let [m, k, n] = self.sizes();
        let rows = [m, n][operand];
        let range = &self.of["magnitudes"][operand];
        let [first, span] = [0, 1].map(|end| range[end].as_u64().unwrap() as u32);
        let code = |bits: u32| (bits & 0x80 | (first + (bits >> 8) % span)) as u8;
        Host {
            dtype: self.format(operand).dtype(),
            dims: [rows, k].into(),
            bytes: hashed(rows * k, self.seed() + operand).map(code).collect(),
        }
    }

    fn scales(&self) -> [f64; 2] {
        [0, 1].map(|index| 2f64.powi(self.whole("scales", index) as i32))
    }

    /// Zeros if there is none.
    fn bias(&self) -> Host {
        let columns = self.sizes()[2];
        let exponent = self.of["bias"].as_i64();
        let step = exponent.map_or(0.0, |exponent| 2f64.powi(exponent as i32));
        let steps = hashed(columns, self.seed() + 2).map(|bits| f64::from(bits % 255) - 127.0);
        Host::new(self.out, [columns], steps.map(|steps| steps * step))
    }

    /// The terms of each result.
    fn terms(&self) -> Vec<Vec<f64>> {
        let [m, k, n] = self.sizes();
        let [a, b] = [0, 1].map(|operand| self.codes(operand).values());
        let (factor, bias) = (self.scales()[0] * self.scales()[1], self.bias().values());
        let places = (0..m).flat_map(|row| (0..n).map(move |column| (row, column)));
        let terms = places.map(|(row, column)| {
            let pairs = a[row * k..][..k].iter().zip(&b[column * k..][..k]);
            let products = pairs.map(|(a, b)| factor * a * b);
            products.chain([bias[column]]).collect()
        });
        terms.collect()
    }

    /// What PyTorch gave.
    fn results(&self) -> Vec<f64> {
        let (key, digits) = match self.out {
            DType::F32 => ("f32", 8),
            _ => ("bf16", 4),
        };
        let text = self.of[key].as_str().unwrap().as_bytes().chunks(digits);
        let bits = text.map(|digits| std::str::from_utf8(digits).unwrap());
        // A bf16 is the upper half of an f32.
        let bits = bits.map(|bits| u32::from_str_radix(bits, 16).unwrap() << (32 - 4 * digits));
        bits.map(|bits| f64::from(f32::from_bits(bits))).collect()
    }

    fn with(&self, mistake: Mistake) -> Reference {
        Reference {
            mistake: Some(mistake),
            ..self.clone()
        }
    }

    /// The operands, with the mistake if one is to be made.
    fn operands(&self) -> [Host; 2] {
        let [mut a, mut b] = [0, 1].map(|operand| self.codes(operand));
        let [_, k, n] = self.sizes();
        match self.mistake {
            Some(Mistake::OtherFormat) => {
                a.dtype = match self.format(0) {
                    Fp8::E4m3 => DType::F8E5M2,
                    Fp8::E5m2 => DType::F8E4M3,
                };
            }
            Some(Mistake::NotTransposed) => {
                let places = (0..n).flat_map(|row| (0..k).map(move |at| at * n + row));
                b.bytes = places.map(|place| b.bytes[place]).collect();
            }
            _ => {}
        }
        [a, b]
    }
}

impl Case for Reference {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let [m, _, n] = self.sizes();
        let [a, b] = self.operands().map(|codes| device.put(&codes));
        let mut scales = self.scales();
        if self.mistake == Some(Mistake::DoubleScale) {
            scales[0] *= 2.0;
        }
        let scales = scales.map(|scale| device.put(&Host::new(DType::F32, [1], [scale])));
        let bias = device.put(&self.bias());
        let has_bias = self.has_bias() && self.mistake != Some(Mistake::NoBias);
        let mut out = device.room(self.out, [m, n]);
        device.run(ScaledMatmul {
            out: out.view_mut(),
            a: a.view(),
            b: b.view(),
            scales: [scales[0].view(), scales[1].view()],
            bias: has_bias.then(|| bias.view()),
            init: Init::Overwrite,
            fast_accumulation: false,
        })?;
        Ok(vec![device.take(&out)])
    }

    fn expected(&self) -> Vec<Expected> {
        let terms = self.terms();
        let sizes = terms
            .iter()
            .map(|terms| terms.iter().copied().map(f64::abs).sum());
        let rule = match self.is_exact() {
            true => Rule::Exact,
            false => Rule::Standard,
        };
        let expected = Expected::new("scaled_mm", self.results(), rule);
        let expected = expected.with_terms(sizes.fold(0.0, f64::max));
        let largest = terms
            .iter()
            .flatten()
            .copied()
            .map(f64::abs)
            .fold(0.0, f64::max);
        let rule = on_tensor_cores(self.sizes()[1], largest);
        vec![expected.with_exception(Target::Cuda, rule)]
    }
}

/// Products of bf16 kernels: those of f32 have no workspace for them.
pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let all = Reference::all()
        .into_iter()
        .filter(|_| dtype == DType::BF16);
    all.map(|case| Box::new(case) as Box<dyn Case>).collect()
}

/// The largest power of two of which a value is a multiple; infinity for zero.
fn unit(value: f64) -> f64 {
    let power = (-60..60).rev().map(|exponent| 2f64.powi(exponent));
    let mut powers = power.filter(|power| (value / power).fract() == 0.0);
    match value == 0.0 {
        true => f64::INFINITY,
        false => powers.next().expect("terms of codes are whole multiples"),
    }
}

/// Sums of whole multiples of a unit are exact in f32 up to 2^24 of them.
#[test]
fn sums_are_exact_where_bits_are_compared() {
    let (exact, other): (Vec<_>, Vec<_>) = Reference::all()
        .into_iter()
        .partition(|case| case.is_exact());
    assert_eq!((exact.len(), other.len()), (24, 24));
    for case in exact {
        for terms in case.terms() {
            let units = terms
                .iter()
                .copied()
                .map(unit)
                .fold(f64::INFINITY, f64::min);
            let size: f64 = terms.into_iter().map(f64::abs).sum();
            assert!(size / units < 2f64.powi(24), "{case:?}");
        }
    }
}

#[test]
fn exact_sums_have_the_bits_of_pytorch_by_any_instructions() {
    for instructions in Instructions::ALL.into_iter().filter(|of| of.are_here()) {
        let device = by_instructions(instructions);
        for case in Reference::all() {
            crate::case::judge(&case, std::slice::from_ref(&device));
        }
    }
}

/// Whatever is done wrong has results that are refused, on the processor and on the emulation of CUDA.
#[test]
fn a_mistake_is_not_taken_for_pytorchs_result() {
    let mistakes = [
        Mistake::DoubleScale,
        Mistake::NotTransposed,
        Mistake::OtherFormat,
        Mistake::NoBias,
    ];
    for device in crate::device::computing(DType::BF16) {
        for case in Reference::all() {
            let has = |mistake: &Mistake| match mistake {
                Mistake::NoBias => case.has_bias(),
                // Both operands would be e5m2, which is refused.
                Mistake::OtherFormat => case.format(1) == Fp8::E4m3,
                _ => true,
            };
            for mistake in mistakes.into_iter().filter(has) {
                let wrong = case.with(mistake);
                let outputs = crate::case::run(&wrong, &device);
                let judged = case.expected()[0].judge(&outputs[0], device.kernels.target());
                assert!(judged.is_err(), "{wrong:?} on {}", device.name);
            }
        }
    }
}
