//! Rotary position embedding: forward, inverse, and there and back, for tokens in sequences and at positions of their own.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::Device;
use crate::host::Host;
use crate::layout::{COLUMNS, Layout, PLAIN, WIDE_COLUMNS};
use crate::oracle::{constant, gradients, values, variable};
use candle_core::{Result, Tensor};
use kernels::{KernelError, Positions};
use memory::DType;

#[derive(Debug)]
struct Rotary {
    dtype: DType,
    batch: usize,
    seq: usize,
    heads: usize,
    head_dim: usize,
    /// Columns of a head that are turned.
    turned: usize,
    /// Positions of the table: as many as a sequence has, or more.
    table: usize,
    /// Whether the tokens' positions are given, in no order.
    given: bool,
    /// How the rows lie.
    layout: Layout,
}

/// Angles of so many positions, for as many columns of a head.
pub fn table(positions: usize, turned: usize) -> Host {
    let half = turned / 2;
    let angle =
        |position: usize, pair: usize| position as f64 / 1e4f64.powf(pair as f64 / half as f64);
    let angles =
        (0..positions).flat_map(|position| (0..half).map(move |pair| angle(position, pair)));
    let values = angles.clone().map(f64::cos).chain(angles.map(f64::sin));
    Host::new(DType::F32, [2, positions, half], values)
}

/// What tokens are turned by.
pub struct Angles {
    pub table: Host,
    /// Of each token.
    pub positions: Host,
}

impl Angles {
    /// All heads of `x`, a row a token: their first columns turned.
    pub fn turned(&self, x: &Tensor, head_dim: usize) -> Result<Tensor> {
        let (tokens, width) = x.dims2()?;
        let half = self.table.dims[2];
        let positions = constant(&self.positions)?.to_dtype(candle_core::DType::U32)?;
        let table = constant(&self.table)?.index_select(&positions, 1)?;
        let table = table.reshape((2, tokens, 1, half))?;
        let (cosines, sines) = (table.get(0)?, table.get(1)?);
        let heads = x.reshape((tokens, width / head_dim, head_dim))?;
        let (low, high) = (heads.narrow(2, 0, half)?, heads.narrow(2, half, half)?);
        let low_turned = (low.broadcast_mul(&cosines)? - high.broadcast_mul(&sines)?)?;
        let high_turned = (high.broadcast_mul(&cosines)? + low.broadcast_mul(&sines)?)?;
        let rest = heads.narrow(2, 2 * half, head_dim - 2 * half)?;
        Tensor::cat(&[low_turned, high_turned, rest], 2)?.reshape(x.shape())
    }
}

impl Rotary {
    fn x(&self) -> Host {
        let dims = [self.batch * self.seq, self.heads * self.head_dim];
        Host::random(self.dtype, dims, 1.0, 1)
    }

    fn table(&self) -> Host {
        table(self.table, self.turned)
    }

    fn positions(&self) -> Host {
        let tokens = self.batch * self.seq;
        match self.given {
            true => Host::random_ids(tokens, self.table, 3),
            false => {
                let places = (0..tokens).map(|token| (token % self.seq) as f64);
                Host::new(DType::I32, [tokens], places)
            }
        }
    }

    /// `x` turned, and `x` as an output gradient turned back.
    fn oracle(&self) -> Result<[Vec<f64>; 2]> {
        let x = variable(&self.x())?;
        let angles = Angles {
            table: self.table(),
            positions: self.positions(),
        };
        let rotated = angles.turned(&x, self.head_dim)?;
        let mut found = gradients(&rotated, &constant(&self.x())?, &[&x])?;
        Ok([values(&rotated)?, found.remove(0)])
    }
}

impl Case for Rotary {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let table = device.put(&self.table());
        let given = device.put(&self.positions());
        let positions = match self.given {
            true => Positions::Given(given.view()),
            false => Positions::Sequences(self.seq),
        };
        let turns: [&[bool]; 3] = [&[false], &[true], &[false, true]];
        let turned = |turns: &[bool]| {
            let mut x = device.put(&self.layout.around(&self.x()));
            for inverse in turns {
                device.run(kernels::Rotary {
                    x: self.layout.view_mut(x.view_mut()),
                    head_dim: self.head_dim,
                    table: table.view(),
                    positions,
                    inverse: *inverse,
                })?;
            }
            Ok(self.layout.take(device, &x))
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
        (1, 1, 1, (2, 2), 1, false, PLAIN),
        (2, 37, 3, (20, 20), 37, false, PLAIN),
        (3, 65, 1, (20, 20), 80, false, PLAIN),
        (1, 37, 6, (48, 48), 37, false, COLUMNS),
        (2, 150, 8, (64, 64), 150, false, PLAIN),
        (2, 37, 3, (20, 20), 70, true, COLUMNS),
        (1, 150, 8, (64, 64), 41, true, WIDE_COLUMNS),
        (2, 37, 3, (23, 10), 37, false, PLAIN),
        (1, 37, 6, (48, 36), 70, true, COLUMNS),
        (1, 37, 4, (128, 64), 37, false, PLAIN),
    ];
    let case = |(batch, seq, heads, (head_dim, turned), table, given, layout)| {
        Box::new(Rotary {
            dtype,
            batch,
            seq,
            heads,
            head_dim,
            turned,
            table,
            given,
            layout,
        }) as Box<dyn Case>
    };
    sizes.into_iter().map(case).collect()
}
