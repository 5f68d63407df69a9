//! Two operations by PTX, compared with loops in f64. The conformance suite has the others; mutations need these.

use crate::device::{Device, numbers, put, room, take, worst};
use kernels::{AttentionShape, FlashAttention, FlashOptions, KernelError, OutputForm, RmsNorm};
use memory::DType;
use ptx::PtxTexts;
use std::sync::Arc;

/// The norm of rows, by some texts.
pub fn rms_norm(sources: &Arc<PtxTexts>, dtype: DType) -> Result<f64, KernelError> {
    let (rows, width) = (5, 520);
    let device = Device::new(sources, dtype);
    let (x, weight) = (numbers(rows * width, 2.0, 2), numbers(width, 1.0, 3));
    let x_tensor = put(&device, [rows, width], &x);
    let weight_tensor = put(&device, [width], &weight);
    let mut y = room(&device, dtype, [rows, width]);
    device.kernels.run(RmsNorm {
        y: Some(y.view_mut()),
        rstd: None,
        form: OutputForm::Values,
        x: x_tensor.view(),
        weight: weight_tensor.view(),
        plus_one: false,
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
    Ok(worst(&take(&device, &y), &expected))
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
        put(&device, dims, values)
    };
    let tensors = [&q, &k, &v].map(|values| tensor(values));
    let mut out = room(&device, dtype, [seq, heads * width]);
    let scratch = FlashAttention::scratch_elements(device.kernels.target(), shape, dtype);
    let mut scratch = room(&device, DType::F32, [scratch]);
    device.kernels.run(FlashAttention {
        out: Some(out.view_mut()),
        lse: None,
        scratch: scratch.view_mut(),
        q: tensors[0].view(),
        k: tensors[1].view(),
        v: tensors[2].view(),
        sinks: None,
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
    Ok(worst(&take(&device, &out), &expected))
}
