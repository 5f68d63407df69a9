//! Rotary position embedding: forward, inverse, and there and back.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::Device;
use crate::host::Host;
use crate::oracle::{constant, gradients, values, variable};
use candle_core::{Result, Tensor};
use kernels::KernelError;
use memory::DType;

#[derive(Debug)]
struct Rotary {
    dtype: DType,
    batch: usize,
    seq: usize,
    heads: usize,
    head_dim: usize,
}

impl Rotary {
    fn x(&self) -> Host {
        let dims = [self.batch * self.seq, self.heads * self.head_dim];
        Host::random(self.dtype, dims, 1.0, 1)
    }

    fn table(&self) -> Host {
        let half = self.head_dim / 2;
        let angle =
            |position: usize, pair: usize| position as f64 / 1e4f64.powf(pair as f64 / half as f64);
        let angles =
            (0..self.seq).flat_map(|position| (0..half).map(move |pair| angle(position, pair)));
        let values = angles.clone().map(f64::cos).chain(angles.map(f64::sin));
        Host::new(DType::F32, [2, self.seq, half], values)
    }

    fn rotated(&self, x: &Tensor) -> Result<Tensor> {
        let half = self.head_dim / 2;
        let table = constant(&self.table())?.reshape((2, 1, self.seq, 1, half))?;
        let (cosines, sines) = (table.get(0)?, table.get(1)?);
        let heads = x.reshape((self.batch, self.seq, self.heads, self.head_dim))?;
        let (low, high) = (heads.narrow(3, 0, half)?, heads.narrow(3, half, half)?);
        let low_rotated = (low.broadcast_mul(&cosines)? - high.broadcast_mul(&sines)?)?;
        let high_rotated = (high.broadcast_mul(&cosines)? + low.broadcast_mul(&sines)?)?;
        Tensor::cat(&[low_rotated, high_rotated], 3)?.reshape(x.shape())
    }

    /// `x` turned, and `x` as an output gradient turned back.
    fn oracle(&self) -> Result<[Vec<f64>; 2]> {
        let x = variable(&self.x())?;
        let rotated = self.rotated(&x)?;
        let mut found = gradients(&rotated, &constant(&self.x())?, &[&x])?;
        Ok([values(&rotated)?, found.remove(0)])
    }
}

impl Case for Rotary {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let table = device.put(&self.table());
        let turns: [&[bool]; 3] = [&[false], &[true], &[false, true]];
        let turned = |turns: &[bool]| {
            let mut x = device.put(&self.x());
            for inverse in turns {
                device.kernels.run(kernels::Rotary {
                    x: x.view_mut(),
                    table: table.view(),
                    inverse: *inverse,
                })?;
            }
            Ok(device.take(&x))
        };
        turns.into_iter().map(turned).collect()
    }

    fn expected(&self) -> Vec<Expected> {
        let [forward, inverse] = self.oracle().unwrap();
        vec![
            Expected::new("rotary: forward", forward, Rule::Standard),
            Expected::new("rotary: inverse", inverse, Rule::Standard),
            Expected::new("rotary: there and back", self.x().values(), Rule::Chained),
        ]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let sizes = [
        (1, 1, 1, 2),
        (2, 37, 3, 20),
        (3, 65, 1, 20),
        (1, 37, 6, 48),
        (2, 150, 8, 64),
    ];
    let case = |(batch, seq, heads, head_dim)| {
        Box::new(Rotary {
            dtype,
            batch,
            seq,
            heads,
            head_dim,
        }) as Box<dyn Case>
    };
    sizes.into_iter().map(case).collect()
}
