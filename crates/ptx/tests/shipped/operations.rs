//! Some operations, against loops in f64.

use crate::device::{Device, numbers, put, put_bytes, room, take, take_bytes, worst};
use crate::texts;
use kernels::cpu::Cpu;
use kernels::quantise::{BLOCK, SIGNED, UNSIGNED};
use kernels::{
    AdamW, AttentionShape, CrossEntropy, FlashAttention, FlashOptions, KernelError, Kernels,
    MasterOperand, MomentOperand, RmsNorm, Swiglu,
};
use memory::{DType, Memory};
use ptx::PtxTexts;
use std::sync::{Arc, LazyLock};

/// The texts of the binary.
static SHIPPED: LazyLock<Arc<PtxTexts>> = LazyLock::new(|| PtxTexts::new(texts()));

/// What results may differ by: a step of the type, relative to the largest.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-6,
        _ => 1.0 / 128.0,
    }
}

const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

#[test]
fn swiglu() {
    // Not a multiple of a pack, and one.
    for (dtype, width) in DTYPES
        .into_iter()
        .flat_map(|dtype| [(dtype, 37), (dtype, 256)])
    {
        let device = Device::new(&SHIPPED, dtype);
        let values = numbers(3 * 2 * width, 4.0, 1);
        let gate_up = put(
            &device.kernels,
            &device.memory,
            dtype,
            [3, 2 * width],
            &values,
        );
        let mut act = room(&device.memory, dtype, [3, width]);
        device
            .kernels
            .run(Swiglu {
                act: act.view_mut(),
                gate_up: gate_up.view(),
            })
            .unwrap();
        let expected: Vec<f64> = values
            .chunks(2 * width)
            .flat_map(|row| row[..width].iter().zip(&row[width..]))
            .map(|(gate, up)| {
                let (gate, up) = (f64::from(*gate), f64::from(*up));
                gate / (1.0 + (-gate).exp()) * up
            })
            .collect();
        assert!(worst(&take(&device.kernels, &act), &expected) < tolerance(dtype));
    }
}

/// The norm of rows, by some texts.
pub fn rms_norm(sources: &Arc<PtxTexts>, dtype: DType) -> Result<f64, KernelError> {
    let (rows, width) = (5, 520);
    let device = Device::new(sources, dtype);
    let (x, weight) = (numbers(rows * width, 2.0, 2), numbers(width, 1.0, 3));
    let x_tensor = put(&device.kernels, &device.memory, dtype, [rows, width], &x);
    let weight_tensor = put(&device.kernels, &device.memory, dtype, [width], &weight);
    let mut y = room(&device.memory, dtype, [rows, width]);
    device.kernels.run(RmsNorm {
        y: Some(y.view_mut()),
        rstd: None,
        x: x_tensor.view(),
        weight: weight_tensor.view(),
        eps: 1e-5,
    })?;
    let mut expected = Vec::new();
    for row in x.chunks(width) {
        let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
        let rstd = 1.0 / (squares / width as f64 + 1e-5).sqrt();
        expected.extend(
            row.iter()
                .zip(&weight)
                .map(|(x, weight)| f64::from(*x) * rstd * f64::from(*weight)),
        );
    }
    Ok(worst(&take(&device.kernels, &y), &expected))
}

#[test]
fn norms() {
    for dtype in DTYPES {
        assert!(rms_norm(&SHIPPED, dtype).unwrap() < tolerance(dtype));
    }
}

#[test]
fn softmax_and_cross_entropy() {
    let (tokens, vocabulary) = (3, 1003);
    for dtype in DTYPES {
        let device = Device::new(&SHIPPED, dtype);
        let values = numbers(tokens * vocabulary, 5.0, 4);
        let mut logits = put(
            &device.kernels,
            &device.memory,
            dtype,
            [tokens, vocabulary],
            &values,
        );
        let targets = put(
            &device.kernels,
            &device.memory,
            DType::I32,
            [tokens],
            &[7.0, -1.0, 1002.0],
        );
        let mut losses = room(&device.memory, DType::F32, [tokens]);
        let operation = CrossEntropy {
            losses: losses.view_mut(),
            logits: logits.view_mut(),
            targets: targets.view(),
            scale: None,
        };
        device.kernels.run(operation).unwrap();
        let (mut gradients, mut expected) = (Vec::new(), Vec::new());
        for (row, target) in values.chunks(vocabulary).zip([Some(7), None, Some(1002)]) {
            let total: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            let loss = target.map_or(0.0, |target| total.ln() - f64::from(row[target]));
            expected.push(loss);
            gradients.extend(row.iter().enumerate().map(|(index, x)| match target {
                None => 0.0,
                Some(target) => f64::from(*x).exp() / total - f64::from(u8::from(index == target)),
            }));
        }
        assert!(worst(&take(&device.kernels, &losses), &expected) < 1e-5);
        assert!(worst(&take(&device.kernels, &logits), &gradients) < tolerance(dtype));
    }
}

/// Causal attention of two heads that share keys and values, by some texts.
pub fn flash_attention(
    sources: &Arc<PtxTexts>,
    dtype: DType,
    seq: usize,
) -> Result<f64, KernelError> {
    let (heads, width) = (2, 64);
    let shape = AttentionShape::new([1, seq], [heads, 1], width);
    let device = Device::new(sources, dtype);
    let [q, k, v] =
        [(heads, 5), (1, 6), (1, 7)].map(|(heads, seed)| numbers(seq * heads * width, 2.0, seed));
    let tensor = |values: &[f32]| {
        let dims = [seq, values.len() / seq];
        put(&device.kernels, &device.memory, dtype, dims, values)
    };
    let tensors = [&q, &k, &v].map(|values| tensor(values));
    let mut out = room(&device.memory, dtype, [seq, heads * width]);
    let scratch = FlashAttention::scratch_elements(device.kernels.target(), shape, dtype);
    let mut scratch = room(&device.memory, DType::F32, [scratch]);
    device.kernels.run(FlashAttention {
        out: Some(out.view_mut()),
        lse: None,
        scratch: scratch.view_mut(),
        q: tensors[0].view(),
        k: tensors[1].view(),
        v: tensors[2].view(),
        shape,
        options: FlashOptions::default(),
    })?;
    let mut expected = vec![0.0; seq * heads * width];
    for query in 0..seq {
        for head in 0..heads {
            let of_query = &q[(query * heads + head) * width..][..width];
            let weights: Vec<f64> = k
                .chunks(width)
                .take(query + 1)
                .map(|key| {
                    let products = of_query
                        .iter()
                        .zip(key)
                        .map(|(q, k)| f64::from(*q) * f64::from(*k));
                    (products.sum::<f64>() / (width as f64).sqrt()).exp()
                })
                .collect();
            let total: f64 = weights.iter().sum();
            let row = &mut expected[(query * heads + head) * width..][..width];
            for (weight, value) in weights.iter().zip(v.chunks(width)) {
                row.iter_mut()
                    .zip(value)
                    .for_each(|(out, v)| *out += weight / total * f64::from(*v));
            }
        }
    }
    Ok(worst(&take(&device.kernels, &out), &expected))
}

#[test]
fn attention_by_tensor_cores() {
    // More keys than a tile has, and a last tile that is not full.
    for seq in [40, 150] {
        assert!(flash_attention(&SHIPPED, DType::F32, seq).unwrap() < 1e-5);
        assert!(
            flash_attention(&SHIPPED, DType::BF16, seq).unwrap() < 2.0 * tolerance(DType::BF16)
        );
    }
}

/// A step of AdamW with 8-bit moments: weights, codes and largest values, as bytes.
fn adamw_8bit(kernels: &Kernels, memory: &Memory) -> Vec<Vec<u8>> {
    let n = 3 * BLOCK + 40;
    let values = |range, seed| numbers(n, range, seed);
    let mut parameters = put(kernels, memory, DType::F32, [n], &values(1.0, 8));
    let gradients = put(kernels, memory, DType::F32, [n], &values(0.5, 9));
    let rates = put(kernels, memory, DType::F32, [3], &[0.02, 2.0, 3.0]);
    let clip = put(kernels, memory, DType::F32, [2], &[1.0, 0.5]);
    let key = put_bytes(kernels, memory, DType::U32, [2], &[1, 2, 3, 4, 5, 6, 7, 8]);
    let squares: Vec<f32> = values(0.1, 10)
        .iter()
        .map(|value| value.abs() + 0.0625)
        .collect();
    let moments = [(&SIGNED, values(0.1, 11)), (&UNSIGNED, squares)].map(|(map, values)| {
        let mut codes = vec![0; n];
        let blocks = values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK));
        let largest: Vec<f32> = blocks
            .map(|(values, codes)| map.quantise(values, codes))
            .collect();
        let codes = put_bytes(kernels, memory, DType::U8, [n], &codes);
        (
            codes,
            put(kernels, memory, DType::F32, [largest.len()], &largest),
        )
    });
    let [
        (mut first, mut first_largest),
        (mut second, mut second_largest),
    ] = moments;
    kernels
        .run(AdamW {
            parameters: parameters.view_mut(),
            master: MasterOperand::Parameters,
            first_moment: MomentOperand::Quantised {
                codes: first.view_mut(),
                absmax: first_largest.view_mut(),
            },
            second_moment: MomentOperand::Quantised {
                codes: second.view_mut(),
                absmax: second_largest.view_mut(),
            },
            gradients: gradients.view(),
            rates: rates.view(),
            clip: clip.view(),
            key: key.view(),
            first_index: 512,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-6,
            weight_decay: 0.1,
        })
        .unwrap();
    let tensors = [parameters, first, first_largest, second, second_largest];
    tensors
        .iter()
        .map(|tensor| take_bytes(kernels, tensor))
        .collect()
}

/// The CPU's loops have the same bits.
#[test]
fn states_of_eight_bits() {
    let device = Device::new(&SHIPPED, DType::F32);
    let found = adamw_8bit(&device.kernels, &device.memory);
    let memory = Memory::host();
    let expected = adamw_8bit(&Cpu::new(&memory, DType::F32).unwrap(), &memory);
    assert_eq!(found, expected);
}
