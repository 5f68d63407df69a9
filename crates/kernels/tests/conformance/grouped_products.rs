//! A product an expert, and the gradient of its weights: experts without rows, with all of them, with less and with more
//! than a block's; rows in the order of experts, and those of tokens.

use crate::DTYPES;
use crate::case::{Case, judge, run};
use crate::compare::{Expected, Rule};
use crate::device::{
    Device, Start, Tensor, by_instructions, computing, emulating_hopper, gradient_starts,
};
use crate::host::Host;
use crate::oracle::add;
use crate::refusals::devices;
use kernels::cpu::Instructions;
use kernels::{ExpertRows, GroupedGradient, GroupedMatmul, Init, KernelError, Matmul, Target};
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

    /// All of them as one group.
    fn together(&self) -> Vec<Range<usize>> {
        let all = 0..self.count();
        vec![all]
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

/// Where the rows of an operand are.
#[derive(Clone, Copy, Debug)]
pub enum Rows {
    InOrder,
    /// Among those of so many tokens, some of which have several rows, and others none.
    OfTokens(usize),
    /// The same rows, gathered beforehand.
    Gathered(usize),
}

impl Rows {
    fn random(self, dtype: DType, dims: [usize; 2], seed: u64) -> HostRows {
        let random = |rows| Host::random(dtype, [rows, dims[1]], 1.0, seed);
        let (Rows::OfTokens(tokens) | Rows::Gathered(tokens)) = self else {
            let (x, table) = (random(dims[0]), None);
            return HostRows { x, table };
        };
        let table = (0..dims[0]).map(|row| ((11 * row + 3) % tokens) as f64);
        let table = Host::new(DType::I32, [dims[0]], table);
        let found = HostRows {
            x: random(tokens),
            table: Some(table),
        };
        match self {
            Rows::Gathered(_) => HostRows {
                x: Host::new(dtype, dims, found.in_order()),
                table: None,
            },
            _ => found,
        }
    }
}

/// Rows, or tokens with the table of rows.
struct HostRows {
    x: Host,
    table: Option<Host>,
}

impl HostRows {
    fn in_order(&self) -> Vec<f64> {
        let (x, width) = (self.x.values(), self.x.dims[1]);
        match &self.table {
            None => x,
            Some(table) => {
                let tokens = table.values().into_iter();
                let rows = tokens.map(|token| &x[token as usize * width..][..width]);
                rows.flatten().copied().collect()
            }
        }
    }

    fn put(&self, device: &Device) -> DeviceRows {
        DeviceRows {
            x: device.put(&self.x),
            table: self.table.as_ref().map(|table| device.put(table)),
        }
    }
}

struct DeviceRows {
    x: Tensor,
    table: Option<Tensor>,
}

impl DeviceRows {
    fn rows(&self) -> ExpertRows<'_> {
        ExpertRows {
            x: self.x.view(),
            row_token: self.table.as_ref().map(Tensor::view),
        }
    }
}

fn scratch(device: &Device, operands: &[ExpertRows]) -> Tensor {
    let target = device.kernels.target();
    let elements = operands.iter().map(|rows| rows.scratch_elements(target));
    device.room(DType::F32, [elements.sum::<usize>()])
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
    pub rows: Rows,
    pub inner: usize,
    pub outputs: usize,
    pub by_columns: bool,
}

impl Product {
    fn tensors(&self) -> (HostRows, Host) {
        let [first, second] = match self.by_columns {
            false => [self.outputs, self.inner],
            true => [self.inner, self.outputs],
        };
        let weights = [self.experts.count(), first, second];
        let rows = [self.experts.rows(), self.inner];
        (
            self.rows.random(self.dtype, rows, 1),
            Host::random(self.dtype, weights, 1.0, 2),
        )
    }
}

impl Product {
    fn run_on(
        &self,
        device: &Device,
        (rows, weights): &(HostRows, Host),
        groups: &[Range<usize>],
    ) -> Result<Vec<Host>, KernelError> {
        let (rows, weights) = (rows.put(device), device.put(weights));
        let offsets = device.put(&self.experts.offsets());
        let mut out = device.room(self.dtype, [self.experts.rows(), self.outputs]);
        let mut scratch = scratch(device, &[rows.rows()]);
        for group in groups {
            device.run(GroupedMatmul {
                out: out.view_mut(),
                scratch: scratch.view_mut(),
                rows: rows.rows(),
                weights: weights.view().rows(group.clone()),
                by_columns: self.by_columns,
                offsets: offsets.view().rows(group.start..group.end + 1),
                of_experts: self.experts.count(),
            })?;
        }
        Ok(vec![device.take(&out)])
    }
}

impl Case for Product {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        self.run_on(device, &self.tensors(), &self.experts.together())
    }

    fn expected(&self) -> Vec<Expected> {
        let (rows, weights) = self.tensors();
        let (x, weights) = (rows.in_order(), weights.values());
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
    /// How rows of `dy` are found, and those of the products' input.
    pub rows: [Rows; 2],
    pub inner: usize,
    pub outputs: usize,
}

impl Gradient {
    fn tensors(&self) -> ([HostRows; 2], Host) {
        let (rows, experts) = (self.experts.rows(), self.experts.count());
        let out = [experts, self.outputs, self.inner];
        let [dy, x] = self.rows;
        (
            [
                dy.random(self.dtype, [rows, self.outputs], 1),
                x.random(self.dtype, [rows, self.inner], 2),
            ],
            Host::random(self.gradient, out, 1.0, 3),
        )
    }
}

impl Gradient {
    fn run_on(
        &self,
        device: &Device,
        (operands, earlier): &([HostRows; 2], Host),
        groups: &[Range<usize>],
    ) -> Result<Vec<Host>, KernelError> {
        let mut out = device.start(self.start, earlier);
        let [earlier, offsets] = [earlier, &self.experts.offsets()].map(|host| device.put(host));
        let operands = operands.each_ref().map(|rows| rows.put(device));
        let [dy, rows] = operands.each_ref().map(DeviceRows::rows);
        let mut scratch = scratch(device, &[dy, rows]);
        for group in groups {
            device.run(GroupedGradient {
                out: out.view_mut().rows(group.clone()),
                scratch: scratch.view_mut(),
                dy,
                rows,
                offsets: offsets.view().rows(group.start..group.end + 1),
                of_experts: self.experts.count(),
                init: self.start.init(&earlier),
            })?;
        }
        Ok(vec![device.take(&out)])
    }
}

impl Case for Gradient {
    fn run(&self, device: &Device) -> Result<Vec<Host>, KernelError> {
        self.run_on(device, &self.tensors(), &self.experts.together())
    }

    fn expected(&self) -> Vec<Expected> {
        let (operands, earlier) = self.tensors();
        let [dy, x] = operands.map(|rows| rows.in_order());
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

/// The ways in which `rows` rows can be found: in order, or by a table of fewer tokens than rows, or of more.
fn ways(rows: usize) -> [Rows; 3] {
    let fewer = rows.div_ceil(3);
    [
        Rows::InOrder,
        Rows::OfTokens(fewer),
        Rows::OfTokens(rows + 5),
    ]
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
        let ways = ways(experts.rows());
        for (by_columns, rows) in [false, true]
            .into_iter()
            .flat_map(|by| ways.map(|of| (by, of)))
        {
            cases.push(Box::new(Product {
                dtype,
                experts: experts.clone(),
                rows,
                inner,
                outputs,
                by_columns,
            }));
        }
        // Gradients of bf16 take kernels that were made for bf16.
        let starts =
            gradient_starts().filter(|(gradient, _)| dtype == DType::BF16 || *gradient == dtype);
        for (number, (gradient, start)) in starts.enumerate() {
            // One of both has a table in three calls; the last start, of bf16, has tables for both.
            let rows = [[0, 1], [1, 0], [0, 0], [2, 1]][number % 4].map(|way: usize| ways[way]);
            cases.push(Box::new(Gradient {
                dtype,
                gradient,
                start,
                experts: experts.clone(),
                rows,
                inner,
                outputs,
            }));
        }
    }
    cases
}

/// Sums of more places than a block for Hopper has stages for, twice over, and five tiles side by side, which two blocks share.
pub fn several_tiles_a_block(dtype: DType) -> Vec<Box<dyn Case>> {
    let product = |by_columns| Product {
        dtype,
        experts: Experts(vec![130, 0, 1]),
        rows: Rows::OfTokens(90),
        inner: 648,
        outputs: 1100,
        by_columns,
    };
    let gradient = |gradient| Gradient {
        dtype,
        gradient,
        start: Start::Accumulate,
        experts: Experts(vec![150, 0, 1, 640]),
        rows: [Rows::InOrder, Rows::OfTokens(90)],
        inner: 1100,
        outputs: 9,
    };
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    cases.extend([false, true].map(|by| Box::new(product(by)) as Box<dyn Case>));
    cases.extend(DTYPES.map(|dtype| Box::new(gradient(dtype)) as Box<dyn Case>));
    cases
}

#[test]
fn kernels_for_hopper_emulated() {
    let devices = [emulating_hopper(DType::BF16)];
    for case in cases(DType::BF16)
        .into_iter()
        .chain(several_tiles_a_block(DType::BF16))
    {
        judge(case.as_ref(), &devices);
    }
}

/// The kernels for Hopper, if there is one.
#[cfg(feature = "cuda")]
#[test]
fn kernels_for_hopper_on_a_gpu() {
    let Some(device) = crate::device::gpu_of_hopper(DType::BF16) else {
        return;
    };
    not_finite_rows_stay_alone(&device, DType::BF16);
    let devices = [device];
    for case in cases(DType::BF16) {
        judge(case.as_ref(), &devices);
    }
    for case in several_tiles_a_block(DType::BF16) {
        judge(case.as_ref(), &devices);
        let [first, again] = [0, 1].map(|_| run(case.as_ref(), &devices[0]));
        assert!(first == again, "{case:?} has other bits when it runs again");
    }
    println!("kernels for Hopper: passed on {}", devices[0].name);
}

/// NaN and infinity stay in their rows, and in their expert's gradient: the bits of all other rows and experts stay the same.
pub fn not_finite_rows_stay_alone(device: &Device, dtype: DType) {
    // Experts end within tiles, and the third has the rows of 7 to 19.
    let experts = Experts(vec![0, 7, 12, 150]);
    let product = Product {
        dtype,
        experts: experts.clone(),
        rows: Rows::InOrder,
        inner: 72,
        outputs: 40,
        by_columns: false,
    };
    let gradient = Gradient {
        dtype,
        gradient: DType::F32,
        start: Start::Overwrite,
        experts,
        rows: [Rows::InOrder; 2],
        inner: 40,
        outputs: 72,
    };
    let spoilt = |rows: HostRows, value: f64| {
        let (dims, mut values) = (rows.x.dims, rows.x.values());
        values[7 * dims[1]..19 * dims[1]].fill(value);
        HostRows {
            x: Host::new(dtype, dims, values),
            table: None,
        }
    };
    let apart = |host: &Host, part: Range<usize>| {
        let row = host.bytes.len() / host.dims[0];
        let [before, after] = [0..part.start, part.end..host.dims[0]];
        [before, after].map(|rows| host.bytes[rows.start * row..rows.end * row].to_vec())
    };
    for value in [f64::NAN, f64::INFINITY] {
        let run = |(x, weights): (HostRows, Host)| {
            product
                .run_on(device, &(x, weights), &product.experts.together())
                .unwrap()
                .remove(0)
        };
        let (x, weights) = product.tensors();
        let [found, clean] = [run((spoilt(x, value), weights)), run(product.tensors())];
        assert!(
            apart(&found, 7..19) == apart(&clean, 7..19),
            "{value} on {}",
            device.name
        );
        assert!(
            found.values()[7 * 40..19 * 40]
                .iter()
                .all(|sum| !sum.is_finite())
        );
        let run = |operands| {
            gradient
                .run_on(device, &operands, &gradient.experts.together())
                .unwrap()
                .remove(0)
        };
        let ([dy, x], earlier) = gradient.tensors();
        let [found, clean] = [
            run(([dy, spoilt(x, value)], earlier)),
            run(gradient.tensors()),
        ];
        assert!(
            apart(&found, 2..3) == apart(&clean, 2..3),
            "{value} on {}",
            device.name
        );
        assert!(
            found.values()[2 * 40 * 72..3 * 40 * 72]
                .iter()
                .all(|sum| !sum.is_finite())
        );
    }
}

#[test]
fn what_is_not_finite_stays_in_its_rows() {
    for dtype in DTYPES {
        for device in computing(dtype)
            .into_iter()
            .chain([emulating_hopper(dtype)])
        {
            not_finite_rows_stay_alone(&device, dtype);
        }
    }
    #[cfg(feature = "cuda")]
    not_finite_rows_stay_alone(
        &crate::device::interpreting_hopper(DType::BF16),
        DType::BF16,
    );
}

/// More than the workspace of the processor holds: of several experts together, and of one alone, whose sums are kept
/// between parts of the depth.
fn large() -> Vec<Product> {
    let product = |rows: &[usize], inner, by_columns| Product {
        dtype: DType::BF16,
        experts: Experts(rows.to_vec()),
        rows: Rows::InOrder,
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
            rows: Rows::InOrder,
            inner,
            outputs,
            by_columns: false,
        });
    let devices = every_set_of_instructions();
    for case in small.chain(large()) {
        let (HostRows { x, .. }, weights) = case.tensors();
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
                device.run(alone).unwrap();
            }
            let same = run(&case, device) == vec![device.take(&out)];
            assert!(same, "{case:?} on {}", device.name);
        }
    }
}

fn every_set_of_instructions() -> Vec<Device> {
    let here = Instructions::ALL.into_iter().filter(|set| set.are_here());
    here.map(by_instructions).collect()
}

/// Every device, and kind of kernels.
fn every_device(dtype: DType) -> Vec<Device> {
    let mut devices = computing(dtype);
    devices.push(emulating_hopper(dtype));
    #[cfg(feature = "cuda")]
    devices.extend(
        [crate::device::interpreting_hopper(dtype)]
            .into_iter()
            .chain(crate::device::gpu_of_hopper(dtype)),
    );
    if dtype == DType::BF16 {
        devices.extend(every_set_of_instructions());
    }
    devices
}

/// Experts in groups have the bits of all together, whichever group comes last: a group leaves others' rows as they are.
#[test]
fn groups_of_experts_have_the_bits_of_all_together() {
    for dtype in DTYPES {
        let experts = Experts(vec![0, 5, 70, 0, 33]);
        let groups = [0..2, 2..3, 3..5];
        let reversed = [3..5, 2..3, 0..2];
        for device in every_device(dtype) {
            for by_columns in [false, true] {
                let product = Product {
                    dtype,
                    experts: experts.clone(),
                    rows: Rows::OfTokens(50),
                    inner: 136,
                    outputs: 72,
                    by_columns,
                };
                let run = |groups: &[Range<usize>]| {
                    product.run_on(&device, &product.tensors(), groups).unwrap()
                };
                let whole = run(&experts.together());
                assert!(
                    run(&groups) == whole && run(&reversed) == whole,
                    "{product:?} on {}",
                    device.name
                );
            }
            let gradient = Gradient {
                dtype,
                gradient: dtype,
                start: Start::Accumulate,
                experts: experts.clone(),
                rows: [Rows::InOrder, Rows::OfTokens(50)],
                inner: 136,
                outputs: 72,
            };
            let run = |groups: &[Range<usize>]| {
                gradient
                    .run_on(&device, &gradient.tensors(), groups)
                    .unwrap()
            };
            let whole = run(&experts.together());
            assert!(
                run(&groups) == whole && run(&reversed) == whole,
                "{gradient:?} on {}",
                device.name
            );
        }
    }
}

/// Wherever rows are read, their sums have one order.
#[test]
fn rows_of_tokens_have_the_bits_of_rows_in_order() {
    for dtype in DTYPES {
        let devices = every_device(dtype);
        let (experts, [inner, outputs]) = (Experts(vec![0, 5, 70, 0, 33]), [136, 72]);
        let same = |ways: [&dyn Case; 2]| {
            for device in &devices {
                let [found, gathered] = ways.map(|case| run(case, device));
                assert!(found == gathered, "{:?} on {}", ways[0], device.name);
            }
        };
        for by_columns in [false, true] {
            let product = |rows| Product {
                dtype,
                experts: experts.clone(),
                rows,
                inner,
                outputs,
                by_columns,
            };
            same([&product(Rows::OfTokens(50)), &product(Rows::Gathered(50))]);
        }
        // The wider operand is the left one.
        for [inner, outputs] in [[inner, outputs], [outputs, inner]] {
            let gradient = |rows: fn(usize) -> Rows| Gradient {
                dtype,
                gradient: dtype,
                start: Start::Overwrite,
                experts: experts.clone(),
                rows: [rows(50), rows(120)],
                inner,
                outputs,
            };
            same([&gradient(Rows::OfTokens), &gradient(Rows::Gathered)]);
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
            rows: [Rows::InOrder; 2],
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
