//! Layer normalisation, forward and backward.

use crate::DTYPES;
use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start};
use crate::host::Host;
use crate::largest::with_codes;
use crate::oracle::{add, constant, gradients, values, variable};
use candle_core::Result;
use kernels::KernelError;
use kernels::operation::{self, LayerNormBackward};
use memory::DType;

#[derive(Debug)]
struct LayerNorm {
    dtype: DType,
    /// Types of the gradients of weight and bias.
    gradients: [DType; 2],
    tokens: usize,
    hidden: usize,
    /// Of the input's entries: what they have in common, and how far they are from it at most. Where that is little,
    /// `eps` counts.
    inputs: (f64, f64),
    /// Of dx, dweight and dbias.
    starts: [Start; 3],
}

const EPS: f32 = 1e-5;

impl LayerNorm {
    /// `x`, `weight`, `bias`, `dy`.
    fn tensors(&self) -> [Host; 4] {
        let (rows, row) = ([self.tokens, self.hidden], [self.hidden]);
        let (mean, range) = self.inputs;
        let x = Host::random(DType::F32, rows, range, 1).values();
        [
            Host::new(self.dtype, rows, x.into_iter().map(|x| x + mean)),
            Host::random(self.dtype, row, 2.0, 2),
            Host::random(self.dtype, row, 2.0, 3),
            Host::random(self.dtype, rows, 1.0, 4),
        ]
    }

    /// What dx, dweight and dbias are added to.
    fn earlier(&self) -> [Host; 3] {
        [
            Host::random(self.dtype, [self.tokens, self.hidden], 1.0, 5),
            Host::random(self.gradients[0], [self.hidden], 1.0, 6),
            Host::random(self.gradients[1], [self.hidden], 1.0, 7),
        ]
    }

    /// y, mean, rstd, dx, dweight, dbias.
    fn oracle(&self) -> Result<Vec<Vec<f64>>> {
        let [x, weight, bias, dy] = self.tensors();
        let (x, weight, bias) = (variable(&x)?, variable(&weight)?, variable(&bias)?);
        let width = self.hidden as f64;
        let mean = (x.sum_keepdim(1)? / width)?;
        let centred = x.broadcast_sub(&mean)?;
        let variance = (centred.sqr()?.sum_keepdim(1)? / width)?;
        let rstd = (variance + f64::from(EPS))?.sqrt()?.recip()?;
        let normalised = centred.broadcast_mul(&rstd)?;
        let y = normalised.broadcast_mul(&weight)?.broadcast_add(&bias)?;
        let found = gradients(&y, &constant(&dy)?, &[&x, &weight, &bias])?;
        let earlier = self.earlier();
        let starts = self.starts.iter().zip(&earlier);
        let gradients = found
            .into_iter()
            .zip(starts)
            .map(|(found, (start, earlier))| add(found, &start.values(earlier)));
        let forward = [values(&y)?, values(&mean)?, values(&rstd)?];
        Ok(forward.into_iter().chain(gradients).collect())
    }
}

impl Case for LayerNorm {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [x, weight, bias, dy] = self.tensors().map(|host| device.put(&host));
        let [mut mean, mut rstd] = [(); 2].map(|()| device.room(DType::F32, [self.tokens]));
        let of = (self.dtype, [self.tokens, self.hidden]);
        let y = with_codes(device, of, |y, form| {
            // Each call writes its own.
            [mean, rstd] = [(); 2].map(|()| device.room(DType::F32, [self.tokens]));
            device.run(operation::LayerNorm {
                y: Some(y),
                mean: Some(mean.view_mut()),
                rstd: Some(rstd.view_mut()),
                form,
                x: x.view(),
                weight: weight.view(),
                bias: bias.view(),
                eps: EPS,
            })
        })?;
        let earlier = self.earlier();
        let [mut dx, mut dweight, mut dbias] =
            [0, 1, 2].map(|index| device.start(self.starts[index], &earlier[index]));
        let earlier = earlier.map(|host| device.put(&host));
        let [dx_init, dweight_init, dbias_init] =
            [0, 1, 2].map(|index| self.starts[index].init(&earlier[index]));
        device.run(LayerNormBackward {
            dx: dx.view_mut(),
            dx_init,
            dweight: dweight.view_mut(),
            dweight_init,
            dbias: dbias.view_mut(),
            dbias_init,
            dy: dy.view(),
            x: x.view(),
            weight: weight.view(),
            mean: mean.view(),
            rstd: rstd.view(),
        })?;
        let others = [&mean, &rstd, &dx, &dweight, &dbias];
        let others = others.map(|tensor| device.take(tensor));
        Ok([y].into_iter().chain(others).collect())
    }

    fn expected(&self) -> Vec<Expected> {
        let names = [
            "layer_norm: y",
            "layer_norm: mean",
            "layer_norm: rstd",
            "layer_norm_backward: dx",
            "layer_norm_backward: dweight",
            "layer_norm_backward: dbias",
        ];
        let outputs = names.into_iter().zip(self.oracle().unwrap());
        let mut expected: Vec<Expected> = outputs
            .map(|(name, values)| Expected::new(name, values, Rule::Standard))
            .collect();
        // The mean of entries that cancel is as well rounded as they are large.
        let mean = expected.remove(1).with_terms(self.inputs.1);
        expected.insert(1, mean);
        expected
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    let (replace, accumulate) = (Start::Overwrite, Start::Accumulate);
    let starts = [
        [replace, replace, replace],
        [accumulate, accumulate, accumulate],
        [replace, accumulate, replace],
        [accumulate, replace, accumulate],
        [replace, replace, accumulate],
    ];
    let sizes = [
        (1, 48),
        (37, 48),
        (37, 288),
        (150, 288),
        (400, 131),
        (1700, 128),
        (37, 1001),
        (18, 5120),
        (3, 5001),
        (18, 8200),
        (2, 8201),
        (3, 20_000),
    ];
    let [f32, bf16] = DTYPES;
    for (index, (tokens, hidden)) in sizes.into_iter().enumerate() {
        for (turn, gradients) in [[f32, f32], [bf16, bf16], [f32, bf16], [bf16, f32]]
            .into_iter()
            .enumerate()
        {
            // Of much, one distribution for each pair of types: it is there for its size.
            let all = [(0.0, 2.0), (0.0, 1e-3), (30.0, 1.0)];
            let inputs = match tokens * hidden > 30_000 {
                true => &all[turn % 3..][..1],
                false => &all[..],
            };
            for inputs in inputs.iter().copied() {
                cases.push(Box::new(LayerNorm {
                    dtype,
                    gradients,
                    tokens,
                    hidden,
                    inputs,
                    starts: starts[(index + turn) % starts.len()],
                }));
            }
        }
    }
    cases
}
