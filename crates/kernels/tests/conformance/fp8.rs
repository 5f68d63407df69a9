//! Codes of FP8: to the bit, by roundings in f64; and products of codes.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, by_instructions};
use crate::host::Host;
use kernels::cpu::Instructions;
use kernels::fp8::Fp8;
use kernels::{
    AbsMax, KernelError, Matmul, Quantise, QuantiseTransposed, ScaledMatmul, Target, TransposeCodes,
};
use memory::DType;

const FORMATS: [Fp8; 2] = [Fp8::E4m3, Fp8::E5m2];

/// Values that one element may have instead of its own.
const SPECIAL: [Option<f64>; 5] = [
    None,
    Some(f64::INFINITY),
    Some(f64::NEG_INFINITY),
    Some(f64::NAN),
    Some(-500.0),
];

#[derive(Debug)]
struct Coded {
    dtype: DType,
    format: Fp8,
    elements: usize,
    range: f64,
    special: Option<f64>,
    seed: u64,
}

impl Coded {
    fn x(&self) -> Host {
        let x = Host::random(self.dtype, [self.elements], self.range, self.seed);
        let mut values = x.values();
        if let Some(special) = self.special {
            values[self.elements / 2] = special;
        }
        // Some become zero.
        for value in values.iter_mut().skip(1).step_by(5) {
            *value *= 2f64.powi(-40);
        }
        Host::new(self.dtype, [self.elements], values)
    }

    /// One more than there are, so that the last is empty; or two, each of which takes a block of threads several rounds.
    fn parts(&self) -> usize {
        match self.special {
            None => 2,
            Some(_) => Quantise::parts(self.elements) + 1,
        }
    }
}

/// Bits of the fraction, the least exponent, and the largest value.
fn limits(format: Fp8) -> (i32, i32, f64) {
    match format {
        Fp8::E4m3 => (3, -6, 448.0),
        Fp8::E5m2 => (2, -14, 57_344.0),
    }
}

/// The nearest value of the format, ties to the even one.
fn rounded(format: Fp8, value: f64) -> f64 {
    let (fraction, least, largest) = limits(format);
    let exponent = (value.abs().log2().floor() as i32).max(least);
    let step = 2f64.powi(exponent - fraction);
    match value == 0.0 {
        true => value,
        false => ((value / step).round_ties_even() * step).clamp(-largest, largest),
    }
}

/// The scale with which values of this size fit.
fn scale(format: Fp8, largest: f64) -> f64 {
    let mut exponent = -62;
    while exponent < 62 && largest > limits(format).2 * 2f64.powi(exponent) {
        exponent += 1;
    }
    match largest {
        0.0 => 1.0,
        largest if largest.is_finite() => 2f64.powi(exponent),
        _ => f64::NAN,
    }
}

impl Case for Coded {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let x = device.put(&self.x());
        let mut largest = device.room(DType::F32, [1]);
        let mut scale = device.room(DType::F32, [1]);
        let mut codes = device.room(self.format.dtype(), [self.elements]);
        device.run(AbsMax {
            out: largest.view_mut(),
            x: x.view(),
        })?;
        let parts = self.parts();
        let mut underflows = device.put(&Host::new(DType::F32, [parts, 2], vec![7.0; 2 * parts]));
        device.run(Quantise {
            codes: codes.view_mut(),
            scale: scale.view_mut(),
            underflows: Some(underflows.view_mut().columns(1..2)),
            x: x.view(),
            largest: largest.view(),
        })?;
        // Counting changes no code.
        let mut others = device.room(self.format.dtype(), [self.elements]);
        device.run(Quantise {
            codes: others.view_mut(),
            scale: scale.view_mut(),
            underflows: None,
            x: x.view(),
            largest: largest.view(),
        })?;
        let all = [largest, scale, codes, others, underflows];
        Ok(all.iter().map(|of| device.take(of)).collect())
    }

    fn expected(&self) -> Vec<Expected> {
        let x = self.x().values();
        let magnitude = |largest: f64, value: &f64| match value.is_nan() {
            true => f64::NAN,
            false if largest.is_nan() => largest,
            false => largest.max(value.abs()),
        };
        let largest = x.iter().fold(0.0, magnitude);
        let scale = scale(self.format, largest);
        let code = |value: &f64| match scale.is_nan() {
            true => f64::NAN,
            false => rounded(self.format, value / scale),
        };
        let codes: Vec<f64> = x.iter().map(code).collect();
        let becomes_zero = |value: &&f64| **value != 0.0 && code(value) == 0.0;
        let part = Quantise::part(self.elements, self.parts());
        let mut counts: Vec<usize> = x
            .chunks(part)
            .map(|part| part.iter().filter(becomes_zero).count())
            .collect();
        counts.resize(self.parts(), 0);
        let underflows = counts
            .into_iter()
            .flat_map(|count| [7.0, 7.0 + count as f64]);
        vec![
            Expected::new("abs_max", vec![largest], Rule::Exact),
            Expected::new("quantise.scale", vec![scale], Rule::Exact),
            Expected::new("quantise", codes.clone(), Rule::Exact),
            Expected::new("quantise, not counting", codes, Rule::Exact),
            Expected::new("quantise.underflows", underflows.collect(), Rule::Exact),
        ]
    }
}

#[derive(Debug)]
struct Transposed {
    format: Fp8,
    sizes: [usize; 2],
    seed: u64,
}

impl Transposed {
    fn x(&self) -> Host {
        Host::random(self.format.dtype(), self.sizes, 100.0, self.seed)
    }
}

impl Case for Transposed {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let x = device.put(&self.x());
        let [rows, columns] = self.sizes;
        let dims = [columns, TransposeCodes::padded(rows)];
        let mut out = device.room(self.format.dtype(), dims);
        device.run(TransposeCodes {
            out: out.view_mut(),
            x: x.view(),
        })?;
        Ok(vec![device.take(&out)])
    }

    fn expected(&self) -> Vec<Expected> {
        let x = self.x().values();
        let out = transposed(self.sizes, &x).map(|code| code.unwrap_or(0.0));
        vec![Expected::new("transpose_codes", out.collect(), Rule::Exact)]
    }
}

/// The elements of a transpose, with none where it is padded.
fn transposed([rows, columns]: [usize; 2], x: &[f64]) -> impl Iterator<Item = Option<f64>> {
    let places = (0..columns)
        .flat_map(move |column| (0..TransposeCodes::padded(rows)).map(move |row| (row, column)));
    places.map(move |(row, column)| (row < rows).then(|| x[row * columns + column]))
}

#[derive(Debug)]
struct CodedAndTransposed {
    dtype: DType,
    sizes: [usize; 2],
    special: Option<f64>,
    seed: u64,
}

impl CodedAndTransposed {
    fn x(&self) -> Host {
        let mut x = Host::random(self.dtype, self.sizes, 3.0, self.seed).values();
        if let Some(special) = self.special {
            x[0] = special;
        }
        Host::new(self.dtype, self.sizes, x)
    }

    fn largest(&self) -> f64 {
        let x = self.x().values().into_iter();
        x.fold(0.0, |largest, value| match value.is_nan() {
            true => f64::NAN,
            false => f64::max(largest, value.abs()),
        })
    }
}

impl Case for CodedAndTransposed {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        // Behind another element, so that it is not aligned.
        let mut x = vec![0.0];
        x.extend(self.x().values());
        let x = device.put(&Host::new(self.dtype, [x.len()], x));
        let aligned = device.put(&self.x());
        let x = match self.special {
            Some(_) => x.view().rows(1..1 + self.sizes.iter().product::<usize>()),
            None => aligned.view(),
        };
        let largest = device.put(&Host::new(DType::F32, [1], [self.largest()]));
        let [rows, columns] = self.sizes;
        let mut scale = device.room(DType::F32, [1]);
        let mut codes = device.room(DType::F8E4M3, [columns, TransposeCodes::padded(rows)]);
        device.run(QuantiseTransposed {
            codes: codes.view_mut(),
            scale: scale.view_mut(),
            x: x.reshape(self.sizes),
            largest: largest.view(),
        })?;
        Ok(vec![device.take(&scale), device.take(&codes)])
    }

    fn expected(&self) -> Vec<Expected> {
        let scale = scale(Fp8::E4m3, self.largest());
        let code = |value: f64| match scale.is_nan() {
            true => f64::NAN,
            false => rounded(Fp8::E4m3, value / scale),
        };
        let x = self.x().values();
        let codes = transposed(self.sizes, &x).map(|value| value.map_or(0.0, code));
        vec![
            Expected::new("quantise_transposed.scale", vec![scale], Rule::Exact),
            Expected::new("quantise_transposed", codes.collect(), Rule::Exact),
        ]
    }
}

/// How far off sums of so many terms of random signs may be on tensor cores. Those of Hopper shift each term to the exponent of the largest
/// of 32 and leave out what is less than 2^-12 of it, as seen on an H100. The signs of what is left out are random too, so it adds up as
/// the root of the number of terms; twice that is a margin.
pub fn on_tensor_cores(terms: usize, largest: f64) -> Rule {
    Rule::Within(2.0 * (terms as f64).sqrt() * largest / 4096.0)
}

#[derive(Debug)]
pub struct Product {
    /// m, k, n.
    pub sizes: [usize; 3],
    pub out: DType,
    pub formats: [Fp8; 2],
    pub scales: [f64; 2],
    pub has_bias: bool,
    pub start: Start,
    pub fast_accumulation: bool,
    pub seed: u64,
}

impl Product {
    /// Codes of `a` and `b`, what is added, and the bias.
    fn tensors(&self) -> [Host; 4] {
        let [m, k, n] = self.sizes;
        let codes = |which: usize, rows| {
            let dtype = self.formats[which].dtype();
            Host::random(dtype, [rows, k], 3.0, self.seed + which as u64)
        };
        let added = Host::random(self.out, [m, n], 2.0, self.seed + 2);
        let bias = Host::random(self.out, [n], 3.0, self.seed + 3);
        [codes(0, m), codes(1, n), added, bias]
    }

    /// The product, the same of magnitudes, and the largest term.
    fn sums(&self) -> ([Vec<f64>; 2], f64) {
        let [m, k, n] = self.sizes;
        let [a, b, ..] = self.tensors().map(|host| host.values());
        let factor = self.scales[0] * self.scales[1];
        let places = (0..m).flat_map(|row| (0..n).map(move |column| (row, column)));
        let terms = |(row, column): (usize, usize)| {
            let rows = a[row * k..][..k].iter().zip(&b[column * k..][..k]);
            rows.map(move |(a, b)| factor * a * b)
        };
        let plain = places.clone().map(|place| terms(place).sum());
        let sizes = places.clone().map(|place| terms(place).map(f64::abs).sum());
        let largest = places.flat_map(terms).map(f64::abs).fold(0.0, f64::max);
        ([plain.collect(), sizes.collect()], largest)
    }
}

impl Case for Product {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let [a, b, added, bias] = self.tensors().map(|host| device.put(&host));
        let mut out = device.put(&self.tensors()[2]);
        let scale = |scale| device.put(&Host::new(DType::F32, [1], [scale]));
        let scales = self.scales.map(scale);
        device.run(ScaledMatmul {
            out: out.view_mut(),
            a: a.view(),
            b: b.view(),
            scales: [scales[0].view(), scales[1].view()],
            bias: self.has_bias.then(|| bias.view()),
            init: self.start.init(&added),
            fast_accumulation: self.fast_accumulation,
        })?;
        Ok(vec![device.take(&out)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [.., added, bias] = self.tensors();
        let (added, bias) = (self.start.values(&added), bias.values());
        let ([plain, sizes], largest_term) = self.sums();
        let bias = bias.iter().cycle().map(|bias| match self.has_bias {
            true => *bias,
            false => 0.0,
        });
        let sums = plain.iter().zip(added).zip(bias);
        let out = sums
            .map(|((sum, added), bias)| sum + added + bias)
            .collect();
        let largest = sizes.into_iter().fold(0.0, f64::max);
        let expected = Expected::new("scaled_matmul", out, Rule::Standard).with_terms(largest);
        let rule = match self.fast_accumulation {
            false => on_tensor_cores(self.sizes[1], largest_term),
            // On Hopper each of k / 32 instructions cuts the sum to 14 bits (DeepSeek-V3's report, section 3.3.2).
            true => Rule::Within(self.sizes[1].div_ceil(32) as f64 * largest / 8192.0),
        };
        vec![expected.with_exception(Target::Cuda, rule)]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    // An element, a thread's shares and more than half of one, a block's and a rest, more than one block of partial maxima.
    let sizes = [1, 45, 4096, 40_003, 600_000];
    let ranges = [1e-60, 1e-30, 1.0, 448.0, 1e30];
    for (index, (elements, range)) in sizes.into_iter().zip(ranges).enumerate() {
        for (format, special) in FORMATS
            .into_iter()
            .flat_map(|format| SPECIAL.map(|special| (format, special)))
        {
            let seed = 7000 + index as u64;
            cases.push(Box::new(Coded {
                dtype,
                format,
                elements,
                range,
                special,
                seed,
            }));
        }
    }
    let sizes = [[1, 16], [16, 64], [37, 144], [129, 48], [300, 272]];
    for (seed, sizes) in (7100..).zip(sizes) {
        for format in FORMATS {
            cases.push(Box::new(Transposed {
                format,
                sizes,
                seed,
            }));
        }
    }
    for ((seed, sizes), special) in (7150..).zip(sizes).zip(SPECIAL) {
        for special in [None, special] {
            cases.push(Box::new(CodedAndTransposed {
                dtype,
                sizes,
                special,
                seed,
            }));
        }
    }
    if dtype == DType::BF16 {
        cases.extend(
            products()
                .into_iter()
                .map(|case| Box::new(case) as Box<dyn Case>),
        );
    }
    cases
}

/// Products of bf16 kernels: those of f32 have no workspace for them.
fn products() -> Vec<Product> {
    let formats = [
        [Fp8::E4m3, Fp8::E4m3],
        [Fp8::E5m2, Fp8::E4m3],
        [Fp8::E4m3, Fp8::E5m2],
    ];
    let sizes = [[1, 16, 16], [37, 48, 144], [131, 528, 32], [300, 1104, 608]];
    let starts = [Start::Overwrite, Start::Accumulate, Start::Add];
    let mut products = Vec::new();
    for (seed, sizes) in (7200..).zip(sizes) {
        for (index, formats) in formats.into_iter().enumerate() {
            for out in [DType::F32, DType::BF16] {
                products.push(Product {
                    sizes,
                    out,
                    formats,
                    scales: [0.25, 2.0],
                    has_bias: (index + seed as usize).is_multiple_of(2),
                    start: starts[(index + seed as usize) % 3],
                    fast_accumulation: index == 0 && out == DType::BF16,
                    seed,
                });
            }
        }
    }
    products
}

/// The bits of a product of codes are those of the product of their values in bf16, by any instructions.
#[test]
fn codes_multiply_as_their_values_do() {
    for instructions in Instructions::ALL.into_iter().filter(|of| of.are_here()) {
        let device = by_instructions(instructions);
        for product in products() {
            let [a, b, added, bias] = product.tensors();
            let scaled = |codes: &Host, scale: f64| {
                let values = codes.values().into_iter().map(|value| value * scale);
                device.put(&Host::new(DType::BF16, codes.dims, values))
            };
            let (a, b) = (scaled(&a, product.scales[0]), scaled(&b, product.scales[1]));
            let (mut out, added, bias) =
                (device.put(&added), device.put(&added), device.put(&bias));
            let matmul = Matmul {
                out: out.view_mut(),
                a: a.view(),
                b: b.view().t(),
                bias: product.has_bias.then(|| bias.view()),
                init: product.start.init(&added),
            };
            device.run(matmul).unwrap();
            let codes = product.run(&device).unwrap();
            assert!(
                codes == [device.take(&out)],
                "{product:?} by {instructions:?}"
            );
        }
    }
}

#[test]
fn products_of_a_tensor_that_is_not_finite_are_nan() {
    for device in crate::device::computing(DType::BF16) {
        let product = Product {
            scales: [f64::NAN, 1.0],
            ..products().remove(0)
        };
        let out = product.run(&device).unwrap();
        assert!(
            out[0].values().iter().all(|value| value.is_nan()),
            "{}",
            device.name
        );
    }
}

#[test]
fn two_of_gradients_are_not_multiplied_and_sizes_are_whole() {
    let refused = [
        ([Fp8::E5m2; 2], [16, 16, 16], "both F8E5M2"),
        ([Fp8::E4m3; 2], [16, 24, 16], "the inner size is 24"),
        ([Fp8::E4m3; 2], [16, 16, 24], "the number of columns is 24"),
    ];
    for device in crate::device::computing(DType::BF16) {
        for (formats, sizes, message) in refused {
            let product = Product {
                sizes,
                formats,
                ..products().remove(0)
            };
            let error = product.run(&device).unwrap_err();
            assert!(error.message.contains(message), "{error}");
        }
        let accepted = products().remove(0);
        accepted.run(&device).unwrap();
    }
}
