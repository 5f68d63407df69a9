//! Products with bf16 by every set of instructions that this processor has: against the oracle, and with the same bits,
//! whatever the instructions, the threads, and how rows are taken together.

use crate::case::{Case, run};
use crate::compare::Expected;
use crate::device::{Device, Start, by_instructions};
use crate::host::Host;
use crate::layout::{COLUMNS, PLAIN, TRANSPOSED, TRANSPOSED_COLUMNS};
use crate::matmul::{self, Bias, Product};
use kernels::cpu::{Cpu, Instructions};
use kernels::{Init, Matmul};
use memory::{DType, Memory};
use std::ops::Range;

/// Depths above what is packed at a time, and above what the workspace holds of the right operand; one strip more than
/// fits beside it; with columns both above and below a panel.
const LARGE: [[usize; 3]; 4] = [
    [1, 4200, 40],
    [40, 70_000, 3],
    [545, 4200, 290],
    [70, 1100, 530],
];

fn devices() -> Vec<Device> {
    let here = Instructions::ALL
        .into_iter()
        .filter(|instructions| instructions.are_here());
    here.map(by_instructions).collect()
}

/// Every layout, start and type of output, above and below whatever is packed at a time. Both operands are bf16.
fn products() -> Vec<Product> {
    let starts = [Start::Overwrite, Start::Accumulate, Start::Add];
    let layouts = [
        [PLAIN, TRANSPOSED],
        [PLAIN, PLAIN],
        [TRANSPOSED, PLAIN],
        [TRANSPOSED_COLUMNS, COLUMNS],
    ];
    let sizes = matmul::SIZES.into_iter().chain(LARGE);
    let all = sizes.flat_map(|sizes| layouts.map(|layouts| (sizes, layouts)));
    let product = |(index, (sizes, layouts))| Product {
        sizes,
        dtypes: [
            [DType::BF16, DType::F32][index % 2],
            DType::BF16,
            DType::BF16,
        ],
        layouts,
        out: [PLAIN, COLUMNS][index / 2 % 2],
        bias: [Bias::None, Bias::Aligned][index % 3 % 2],
        start: starts[index % 3],
        seed: 4000 + index as u64,
    };
    all.enumerate().map(product).collect()
}

#[test]
fn every_set_of_instructions_gives_the_same_bits() {
    let devices = devices();
    for product in products() {
        let expected = product.expected();
        let mut first: Option<Vec<Host>> = None;
        for device in &devices {
            let outputs = judged(&product, device, &expected);
            let first = first.get_or_insert_with(|| outputs.clone());
            assert!(
                *first == outputs,
                "{product:?}: {} has other bits",
                device.name
            );
        }
    }
}

/// Sums of anything but bf16 may be fused or not, as the processor has it.
#[test]
fn every_set_of_instructions_takes_every_type() {
    let devices = devices();
    for case in matmul::cases(DType::BF16) {
        let expected = case.expected();
        for device in &devices {
            judged(case.as_ref(), device, &expected);
        }
    }
}

fn judged(case: &dyn Case, device: &Device, expected: &[Expected]) -> Vec<Host> {
    let outputs = run(case, device);
    for (output, expected) in outputs.iter().zip(expected) {
        let judged = expected.judge(output, device.kernels.target());
        judged.unwrap_or_else(|message| panic!("{case:?} on {}: {message}", device.name));
    }
    outputs
}

/// By the flags that Linux lists, so that the tests above do test AMX where there is AMX.
#[test]
fn the_best_instructions_of_the_processor_are_taken() {
    let cpu = Cpu::new(&Memory::host(), DType::BF16).unwrap();
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    let expected = if has("amx_bf16") && has("avx512bw") {
        Instructions::Amx
    } else if has("avx512_bf16") {
        Instructions::Avx512Bf16
    } else if has("avx512bw") && has("avx512dq") && has("avx512vl") {
        Instructions::Avx512
    } else if has("avx2") && has("fma") {
        Instructions::Avx2
    } else {
        Instructions::Baseline
    };
    assert_eq!(cpu.instructions(), expected);
}

/// Sums in the order that `tiles.rs` states, one by one.
#[test]
fn sums_run_in_the_order_that_is_stated() {
    let (m, k, n) = (3, 133, 5);
    let [a, b] =
        [([m, k], 1), ([k, n], 2)].map(|(dims, seed)| Host::random(DType::BF16, dims, 1.0, seed));
    let [a_values, b_values] = [&a, &b].map(Host::values);
    let mut expected = Vec::new();
    for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
        let mut total = 0.0f32;
        for block in (0..k).step_by(32) {
            let mut chains = [0.0f32; 2];
            for place in block..k.min(block + 32) {
                let product = a_values[row * k + place] * b_values[place * n + column];
                chains[(place - block) % 2] += product as f32;
            }
            total += chains[0] + chains[1];
        }
        expected.push(f64::from(total));
    }
    let expected = Host::new(DType::F32, [m, n], expected);
    for device in devices() {
        let [a, b] = [&a, &b].map(|host| device.put(host));
        let mut out = device.room(DType::F32, [m, n]);
        let product = Matmul {
            out: out.view_mut(),
            a: a.view(),
            b: b.view(),
            bias: None,
            init: Init::Overwrite,
        };
        device.run(product).unwrap();
        assert!(device.take(&out) == expected, "{}", device.name);
    }
}

/// Rows `rows` of a product of `x` and a weight, or of the transposed product its columns.
fn part_of(
    device: &Device,
    [x, weight]: [&Host; 2],
    rows: Range<usize>,
    is_turned: bool,
) -> Vec<f64> {
    let (count, width) = (rows.len(), weight.dims.as_slice()[0]);
    let [x, weight] = [x, weight].map(|host| device.put(host));
    let x = x.view().rows(rows);
    let dims = if is_turned {
        [width, count]
    } else {
        [count, width]
    };
    let mut out = device.room(DType::BF16, dims);
    let (a, b) = match is_turned {
        false => (x, weight.view().t()),
        true => (weight.view(), x.t()),
    };
    let product = Matmul {
        out: out.view_mut(),
        a,
        b,
        bias: None,
        init: Init::Overwrite,
    };
    device.run(product).unwrap();
    let values = device.take(&out).values();
    match is_turned {
        false => values,
        true => (0..count)
            .flat_map(|row| (0..width).map(move |column| (row, column)))
            .map(|(row, column)| values[column * count + row])
            .collect(),
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let (rows, depth, width) = (70, 1500, 77);
    let x = Host::random(DType::BF16, [rows, depth], 1.0, 1);
    let weight = Host::random(DType::BF16, [width, depth], 1.0, 2);
    for device in devices() {
        let whole = part_of(&device, [&x, &weight], 0..rows, false);
        for (part, is_turned) in [
            (5..6, false),
            (3..36, false),
            (0..rows, true),
            (69..70, true),
        ] {
            let alone = part_of(&device, [&x, &weight], part.clone(), is_turned);
            assert_eq!(
                alone,
                whole[part.start * width..part.end * width],
                "{} {part:?}",
                device.name
            );
        }
    }
}
