//! The gated norm behind the gated delta rule.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, gradient_starts};
use crate::gated_delta::sigmoid;
use crate::host::Host;
use crate::layout::{COLUMNS, Layout, WIDE_COLUMNS};
use crate::oracle::{add, constant, gradients, values, variable};
use candle_core::Result;
use kernels::{GatedNorm, GatedNormBackward, KernelError};
use memory::DType;

const EPS: f32 = 1e-6;

#[derive(Debug)]
struct Norm {
    dtype: DType,
    gradient: DType,
    start: Start,
    tokens: usize,
    heads: usize,
    head: usize,
    /// Where the gate and its gradient lie.
    z: Layout,
}

impl Norm {
    fn tensors(&self) -> [Host; 5] {
        let rows = [self.tokens, self.heads * self.head];
        [
            Host::random(self.dtype, rows, 1.0, 1),
            Host::random(self.dtype, rows, 2.0, 2),
            Host::random(self.dtype, [self.head], 2.0, 3),
            Host::random(self.dtype, rows, 1.0, 4),
            Host::random(self.gradient, [self.head], 1.0, 5),
        ]
    }

    fn oracle(&self) -> Result<[Vec<f64>; 5]> {
        let [x, z, weight, dy, earlier] = self.tensors();
        let (x, z, weight) = (variable(&x)?, variable(&z)?, variable(&weight)?);
        let heads = x.reshape((self.tokens, self.heads, self.head))?;
        let rstd = ((heads.sqr()?.sum_keepdim(2)? / self.head as f64)? + f64::from(EPS))?
            .sqrt()?
            .recip()?;
        let normed = heads.broadcast_mul(&rstd)?.broadcast_mul(&weight)?;
        let y = (normed.reshape(x.dims())? * (z.as_tensor() * sigmoid(&z)?)?)?;
        let [dx, dz, dweight] = gradients(&y, &constant(&dy)?, &[&x, &z, &weight])?
            .try_into()
            .unwrap();
        Ok([
            values(&y)?,
            values(&rstd)?,
            dx,
            dz,
            add(dweight, &self.start.values(&earlier)),
        ])
    }
}

impl Case for Norm {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [x, z, weight, dy, earlier] = self.tensors();
        let dims = [self.tokens, self.heads * self.head];
        let with_gaps = device.put(&self.z.around(&z));
        let z = || self.z.view(with_gaps.view());
        let [x, weight, dy] = [&x, &weight, &dy].map(|host| device.put(host));
        let mut y = device.room(self.dtype, dims);
        let mut rstd = device.room(DType::F32, [self.tokens, self.heads]);
        device.run(GatedNorm {
            y: Some(y.view_mut()),
            rstd: Some(rstd.view_mut()),
            x: x.view(),
            z: z(),
            weight: weight.view(),
            eps: EPS,
        })?;
        let mut dx = device.room(self.dtype, dims);
        let mut dz = device.put(&self.z.stored(self.dtype, dims, 6));
        let mut dweight = device.start(self.start, &earlier);
        let earlier = device.put(&earlier);
        device.run(GatedNormBackward {
            dx: dx.view_mut(),
            dz: self.z.view_mut(dz.view_mut()),
            dweight: dweight.view_mut(),
            init: self.start.init(&earlier),
            dy: dy.view(),
            x: x.view(),
            z: z(),
            weight: weight.view(),
            rstd: rstd.view(),
        })?;
        let [y, rstd, dx, dweight] = [&y, &rstd, &dx, &dweight].map(|tensor| device.take(tensor));
        let dz = self.z.take(device, &dz);
        Ok(vec![y, rstd, dx, dz, dweight])
    }

    fn expected(&self) -> Vec<Expected> {
        let [y, rstd, dx, dz, dweight] = self.oracle().unwrap();
        vec![
            Expected::new("gated_norm: y", y, Rule::Chained),
            Expected::new("gated_norm: rstd", rstd, Rule::Standard),
            Expected::new("gated_norm_backward: dx", dx, Rule::Standard),
            Expected::new("gated_norm_backward: dz", dz, Rule::Standard),
            Expected::new("gated_norm_backward: dweight", dweight, Rule::Standard),
        ]
    }
}

/// Heads narrower than a warp, than a block of columns, as wide, and wider; rows that are one part of the weight's gradient, and several.
pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let starts: Vec<_> = gradient_starts()
        .filter(|(gradient, _)| dtype == DType::BF16 || *gradient == dtype)
        .collect();
    let all = [
        [1, 1, 2],
        [126, 3, 5],
        [130, 4, 33],
        [64, 2, 64],
        [20, 2, 128],
        [3, 1, 300],
    ];
    let all = all.into_iter().enumerate();
    let case = |(number, [tokens, heads, head]): (usize, [usize; 3])| -> Box<dyn Case> {
        let (gradient, start) = starts[number % starts.len()];
        Box::new(Norm {
            dtype,
            gradient,
            start,
            tokens,
            heads,
            head,
            z: [COLUMNS, WIDE_COLUMNS][number % 2],
        })
    };
    all.map(case).collect()
}
