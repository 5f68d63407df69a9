//! Muon's iteration against one in f64. That bits do not depend on homes is in `whole_tensors.rs`.

use crate::common::noise;
use kernels::cpu::Cpu;
use memory::{DType, Homes, Layer, LayoutBuilder, Memory};
use optim::{
    Hyperparameters, MasterFormat, MomentFormat, Muon, Optimizer, OptimizerKind, Recipe,
    StepNumbers, WholeTensor,
};
use std::rc::Rc;
use units::{Gradients, Weights};

fn hyperparameters() -> Hyperparameters {
    Hyperparameters {
        kind: OptimizerKind::Muon,
        ..Hyperparameters::default()
    }
}

/// `a [m, k] b [k, n]`.
fn product(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let at = |index: usize| (0..k).map(move |inner| (index / n * k + inner, inner * n + index % n));
    let entry = |index| at(index).map(|(left, right)| a[left] * b[right]).sum();
    (0..m * n).map(entry).collect()
}

fn transposed(x: &[f64], [rows, columns]: [usize; 2]) -> Vec<f64> {
    let entry = |index: usize| x[index % rows * columns + index / rows];
    (0..rows * columns).map(entry).collect()
}

/// Newton-Schulz's iteration of a matrix that is not taller than wide.
fn orthogonalised(x: &[f64], [rows, columns]: [usize; 2], muon: &Muon) -> Vec<f64> {
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut x: Vec<f64> = x.iter().map(|x| x / norm.max(muon.ns_eps)).collect();
    let [a, b, c] = muon.ns_coefficients;
    for _ in 0..muon.ns_steps {
        let gram = product(&x, &transposed(&x, [rows, columns]), [rows, columns, rows]);
        let squared = product(&gram, &gram, [rows; 3]);
        let pairs = gram.iter().zip(squared);
        let update: Vec<f64> = pairs.map(|(one, two)| b * one + c * two).collect();
        let moved = product(&update, &x, [rows, rows, columns]);
        x = x
            .iter()
            .zip(moved)
            .map(|(x, moved)| a * x + moved)
            .collect();
    }
    x
}

/// One update of a tensor of `count` matrices by the optimizer, and of each matrix by the formula in f64.
fn updates(count: usize, shape: [usize; 2], muon: Muon) -> [Vec<f64>; 2] {
    let memory = Memory::host();
    let mut builder = LayoutBuilder::default();
    builder.add(Layer::Block(0), "matrices", &[count, shape[0], shape[1]]);
    let layout = Rc::new(builder.build());
    let kernels: Box<kernels::Kernels> = Box::new(Cpu::new(&memory, DType::BF16).unwrap());
    let recipe = Recipe {
        hyperparameters: Hyperparameters {
            muon,
            weight_decay: 0.0,
            clip_norm: f64::INFINITY,
            ..hyperparameters()
        },
        matrices: vec![WholeTensor {
            entry: 0,
            count,
            shape,
            stored: shape,
        }],
        formats: (MomentFormat::F32, MasterFormat::None),
        weights: DType::F32,
        gradients: DType::F32,
    };
    let homes = Homes::default();
    let mut optimizer = Optimizer::lease(&memory, &layout, &recipe, &homes, None).unwrap();
    let mut weights = Weights::lease(&memory, &layout, DType::F32, &homes, None).unwrap();
    let mut gradients =
        Gradients::lease(&memory, &layout, DType::F32, &homes.gradients, None).unwrap();
    memory.reserve_slab(1 << 20).unwrap();
    let values: Vec<f32> = layout.entries()[0].range().map(|at| noise(5, at)).collect();
    let range = layout.entries()[0].range();
    let bytes = bytemuck::cast_slice(&values);
    gradients.store(&*kernels, range.clone(), bytes).unwrap();
    let category = memory::Category::Temporary;
    let loss = memory.lease_persistent(category, "loss", [1], DType::F32);
    let loss = loss.unwrap();
    let numbers = StepNumbers {
        step: 1,
        update: 1,
        learning_rate: 1.0,
        matrix_rate: 1.0,
        seed: 0,
    };
    let (weights_mut, gradients) = (&mut weights, &mut gradients);
    let begun = optimizer.end_step(&*kernels, weights_mut, gradients, loss.view(), numbers);
    begun.unwrap();
    let mut moved = vec![0f32; values.len()];
    let bytes = bytemuck::cast_slice_mut(&mut moved);
    weights.read(&*kernels, range, bytes).unwrap();
    let values: Vec<f64> = values.into_iter().map(f64::from).collect();
    let [rows, columns] = shape;
    let oracle = |values: &[f64]| match rows <= columns {
        true => orthogonalised(values, shape, &muon),
        false => {
            let wide = [columns, rows];
            let turned = orthogonalised(&transposed(values, shape), wide, &muon);
            transposed(&turned, wide)
        }
    };
    let oracle: Vec<f64> = values.chunks(rows * columns).flat_map(oracle).collect();
    let ratio = 0.2 * (rows.max(columns) as f64).sqrt();
    [
        moved.into_iter().map(|weight| -f64::from(weight)).collect(),
        oracle.into_iter().map(|along| ratio * along).collect(),
    ]
}

#[test]
fn the_iteration_is_that_of_f64() {
    let cases = [
        (1, [7, 7]),
        (1, [24, 40]),
        (1, [65, 33]),
        (1, [1, 50]),
        (1, [300, 4]),
        (5, [24, 40]),
        (3, [65, 33]),
    ];
    for (count, shape) in cases {
        for (ns_dtype, allowed) in [(DType::F32, 1e-5), (DType::BF16, 0.05)] {
            let muon = Muon {
                ns_dtype,
                ..Muon::default()
            };
            let [found, expected] = updates(count, shape, muon);
            let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            let pairs = found.iter().zip(&expected);
            let error = pairs.fold(0.0, |most: f64, (x, y)| most.max((x - y).abs()));
            assert!(
                error <= allowed * largest,
                "{count} {shape:?} {ns_dtype:?}: {error} of {largest}"
            );
        }
    }
}
