//! A product an expert, and the gradient of its weights: experts without rows, with all of them, with less and with more
//! than a block's.

use crate::case::{Case, run};
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, by_instructions, gradient_starts};
use crate::host::Host;
use crate::oracle::add;
use crate::refusals::devices;
use kernels::cpu::Instructions;
use kernels::{GroupedGradient, GroupedMatmul, Init, KernelError, Matmul, Target};
use memory::DType;
use std::ops::Range;

/// Where each expert's rows are, and the table of it.
#[derive(Clone, Debug)]
pub struct Experts(pub Vec<usize>);

impl Experts {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn rows(&self) -> usize {
        self.0.iter().sum()
    }

    fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.0.iter().scan(0, |start, rows| {
            let range = *start..*start + rows;
            *start = range.end;
            Some(range)
        })
    }

    fn offsets(&self) -> Host {
        let ends = self.ranges().map(|range| range.end as f64);
        let offsets: Vec<f64> = [0.0].into_iter().chain(ends).collect();
        Host::new(DType::I32, [self.count() + 1], offsets)
    }
}

/// `a [m, k] b [k, n]` in f64, given by elements.
fn product(
    [m, k, n]: [usize; 3],
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
) -> Vec<f64> {
    let places = (0..m).flat_map(|row| (0..n).map(move |column| (row, column)));
    let sum = |(row, column)| (0..k).map(|place| a(row, place) * b(place, column)).sum();
    places.map(sum).collect()
}

/// Few entries may all cancel: then the largest sum of absolute terms counts.
fn expected(name: &'static str, values: Vec<f64>, depth: usize) -> Expected {
    let terms = if values.len() < 64 { depth as f64 } else { 0.0 };
    Expected::new(name, values, Rule::Standard).with_terms(terms)
}

#[derive(Clone, Debug)]
pub struct Product {
    pub dtype: DType,
    pub experts: Experts,
    pub inner: usize,
    pub outputs: usize,
    pub by_columns: bool,
}

impl Product {
    fn tensors(&self) -> [Host; 2] {
        let [first, second] = match self.by_columns {
            false => [self.outputs, self.inner],
            true => [self.inner, self.outputs],
        };
        let weights = [self.experts.count(), first, second];
        [
            Host::random(self.dtype, [self.experts.rows(), self.inner], 1.0, 1),
            Host::random(self.dtype, weights, 1.0, 2),
        ]
    }
}

impl Case for Product {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let [x, weights] = self.tensors().map(|host| device.put(&host));
        let offsets = device.put(&self.experts.offsets());
        let mut out = device.room(self.dtype, [self.experts.rows(), self.outputs]);
        device.kernels.run(GroupedMatmul {
            out: out.view_mut(),
            x: x.view(),
            weights: weights.view(),
            by_columns: self.by_columns,
            offsets: offsets.view(),
        })?;
        Ok(vec![device.take(&out)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [x, weights] = self.tensors().map(|host| host.values());
        let (inner, outputs) = (self.inner, self.outputs);
        let of_expert = |(expert, rows): (usize, Range<usize>)| {
            let weights = &weights[expert * inner * outputs..][..inner * outputs];
            let start = rows.start;
            product(
                [rows.len(), inner, outputs],
                |row, place| x[(start + row) * inner + place],
                |place, column| match self.by_columns {
                    false => weights[column * inner + place],
                    true => weights[place * outputs + column],
                },
            )
        };
        let out = self.experts.ranges().enumerate().flat_map(of_expert);
        vec![expected("grouped_matmul", out.collect(), inner)]
    }
}

#[derive(Clone, Debug)]
pub struct Gradient {
    pub dtype: DType,
    pub gradient: DType,
    pub start: Start,
    pub experts: Experts,
    pub inner: usize,
    pub outputs: usize,
}

impl Gradient {
    fn tensors(&self) -> [Host; 3] {
        let (rows, experts) = (self.experts.rows(), self.experts.count());
        let out = [experts, self.outputs, self.inner];
        [
            Host::random(self.dtype, [rows, self.outputs], 1.0, 1),
            Host::random(self.dtype, [rows, self.inner], 1.0, 2),
            Host::random(self.gradient, out, 1.0, 3),
        ]
    }
}

impl Case for Gradient {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        let [dy, x, earlier] = self.tensors();
        let mut out = device.start(self.start, &earlier);
        let [dy, x, earlier, offsets] =
            [dy, x, earlier, self.experts.offsets()].map(|host| device.put(&host));
        device.kernels.run(GroupedGradient {
            out: out.view_mut(),
            dy: dy.view(),
            x: x.view(),
            offsets: offsets.view(),
            init: self.start.init(&earlier),
        })?;
        Ok(vec![device.take(&out)])
    }

    fn expected(&self) -> Vec<Expected> {
        let [dy, x, earlier] = self.tensors();
        let [dy, x] = [dy, x].map(|host| host.values());
        let (inner, outputs) = (self.inner, self.outputs);
        let of_expert = |rows: Range<usize>| {
            let start = rows.start;
            product(
                [outputs, rows.len(), inner],
                |row, place| dy[(start + place) * outputs + row],
                |place, column| x[(start + place) * inner + column],
            )
        };
        let out = self.experts.ranges().flat_map(of_expert).collect();
        let out = add(out, &self.start.values(&earlier));
        vec![expected("grouped_gradient", out, self.experts.rows())]
    }
}

/// One expert; experts without rows at the start, in between and at the end; all rows to one; less, as much and more than
/// a block's; more experts than a warp has lanes; more in depth than a tile.
fn routings() -> Vec<(Vec<usize>, [usize; 2])> {
    let many = (0..70).map(|expert| [0, 3, 1][expert % 3]).collect();
    vec![
        (vec![1], [1, 1]),
        (vec![37], [48, 131]),
        (vec![0, 5, 0, 70, 1, 0], [131, 37]),
        (vec![0, 0, 130, 0], [40, 144]),
        (vec![64, 128, 16], [72, 256]),
        (vec![33, 9], [200, 24]),
        (many, [33, 20]),
    ]
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (rows, [inner, outputs]) in routings() {
        let experts = Experts(rows);
        for by_columns in [false, true] {
            cases.push(Box::new(Product {
                dtype,
                experts: experts.clone(),
                inner,
                outputs,
                by_columns,
            }));
        }
        // Gradients of bf16 take kernels that were made for bf16.
        let starts =
            gradient_starts().filter(|(gradient, _)| dtype == DType::BF16 || *gradient == dtype);
        for (gradient, start) in starts {
            cases.push(Box::new(Gradient {
                dtype,
                gradient,
                start,
                experts: experts.clone(),
                inner,
                outputs,
            }));
        }
    }
    cases
}

/// More than the workspace of the processor holds: of several experts together, and of one alone, whose sums are kept
/// between parts of the depth.
fn large() -> Vec<Product> {
    let product = |rows: &[usize], inner, by_columns| Product {
        dtype: DType::BF16,
        experts: Experts(rows.to_vec()),
        inner,
        outputs: 40,
        by_columns,
    };
    vec![
        product(&[700, 20, 0, 600, 3], 1100, false),
        product(&[9, 300, 40], 4200, true),
        product(&[5, 40], 70_000, false),
    ]
}

/// The product of each expert alone has the same bits.
#[test]
fn every_set_of_instructions_gives_the_bits_of_products_alone() {
    let small = routings()
        .into_iter()
        .map(|(rows, [inner, outputs])| Product {
            dtype: DType::BF16,
            experts: Experts(rows),
            inner,
            outputs,
            by_columns: false,
        });
    let here = Instructions::ALL.into_iter().filter(|set| set.are_here());
    let devices: Vec<Device> = here.map(by_instructions).collect();
    for case in small.chain(large()) {
        let [x, weights] = case.tensors();
        for device in &devices {
            let [x, weights] = [&x, &weights].map(|host| device.put(host));
            let mut out = device.room(case.dtype, [case.experts.rows(), case.outputs]);
            for (expert, rows) in case.experts.ranges().enumerate() {
                let weights = weights.view().rows(expert..expert + 1);
                let weights = match case.by_columns {
                    false => weights.reshape([case.outputs, case.inner]).t(),
                    true => weights.reshape([case.inner, case.outputs]),
                };
                let alone = Matmul {
                    out: out.view_mut().rows(rows.clone()),
                    a: x.view().rows(rows),
                    b: weights,
                    bias: None,
                    init: Init::Overwrite,
                };
                device.kernels.run(alone).unwrap();
            }
            let same = run(&case, device) == vec![device.take(&out)];
            assert!(same, "{case:?} on {}", device.name);
        }
    }
}

#[test]
fn kernels_made_for_f32_refuse_gradients_of_bf16() {
    for device in devices(DType::F32) {
        let gradient = |gradient| Gradient {
            dtype: DType::F32,
            gradient,
            start: Start::Overwrite,
            experts: Experts(vec![2, 1]),
            inner: 3,
            outputs: 4,
        };
        if device.kernels.target() == Target::Cpu {
            let refused = gradient(DType::BF16).run(&device).unwrap_err();
            assert_eq!(refused.operation, "grouped_gradient");
        }
        run(&gradient(DType::F32), &device);
    }
}
