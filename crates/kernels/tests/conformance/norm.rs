//! Sums and norms over whole arenas.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start};
use crate::host::Host;
use crate::oracle::{add, constant, values};
use candle_core::Result;
use kernels::{KernelError, NORM_PARTS};
use memory::DType;

/// Positive entries, the first and the last large enough to be missed.
fn entries(dtype: DType, elements: usize) -> Host {
    let mut values = Host::random(DType::F32, [elements], 1.0, 1).values();
    values.iter_mut().for_each(|value| *value = value.abs());
    values[0] += elements as f64 / 100.0;
    values[elements - 1] += elements as f64 / 100.0;
    Host::new(dtype, [elements], values)
}

#[derive(Debug)]
struct Sum {
    elements: usize,
    start: Start,
}

impl Sum {
    fn earlier(&self) -> Host {
        Host::new(DType::F32, [1], [3.25])
    }

    fn oracle(&self) -> Result<Vec<f64>> {
        let sum = values(&constant(&entries(DType::F32, self.elements))?.sum_all()?)?;
        Ok(add(sum, &self.start.values(&self.earlier())))
    }
}

impl Case for Sum {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let x = device.put(&entries(DType::F32, self.elements));
        let mut out = device.start(self.start, &self.earlier());
        let earlier = device.put(&self.earlier());
        device.kernels.run(kernels::Sum {
            out: out.view_mut(),
            x: x.view(),
            init: self.start.init(&earlier),
        })?;
        Ok(vec![device.take(&out)])
    }

    fn expected(&self) -> Vec<Expected> {
        vec![Expected::new("sum", self.oracle().unwrap(), Rule::Standard)]
    }
}

#[derive(Clone, Copy, Debug)]
enum Entries {
    Finite,
    /// So small that what is added to the norm shows.
    Tiny,
    /// The norm is above every f32, its entries are not.
    Overflow,
    /// The squares are above every f32, the norm is not: counts as not finite.
    OverflowingSquares,
    Infinite,
    Nan,
}

#[derive(Debug)]
struct NormAndClip {
    dtype: DType,
    elements: usize,
    entries: Entries,
    max_norm: Option<f32>,
    loss: f32,
}

impl NormAndClip {
    fn x(&self) -> Host {
        let mut values = entries(self.dtype, self.elements).values();
        let mut last = |last: f64| values[self.elements / 2..].fill(last);
        match self.entries {
            Entries::Finite => {}
            Entries::Tiny => values.iter_mut().for_each(|value| *value *= 1e-7),
            Entries::Overflow => last(3e38),
            Entries::OverflowingSquares => last(1e20),
            Entries::Infinite => last(f64::INFINITY),
            Entries::Nan => last(f64::NAN),
        }
        Host::new(self.dtype, [self.elements], values)
    }

    fn oracle(&self) -> Result<[f64; 2]> {
        let norm = constant(&self.x())?
            .sqr()?
            .sum_all()?
            .sqrt()?
            .to_scalar::<f64>()?;
        let norm = if norm > f64::from(f32::MAX).sqrt() {
            f64::INFINITY
        } else {
            norm
        };
        let factor = match self.max_norm {
            _ if !norm.is_finite() || !self.loss.is_finite() => f64::NAN,
            Some(max_norm) => (f64::from(max_norm) / (norm + 1e-6)).min(1.0),
            None => 1.0,
        };
        Ok([norm, factor])
    }
}

impl Case for NormAndClip {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let x = device.put(&self.x());
        let loss = device.put(&Host::new(DType::F32, [1], [f64::from(self.loss)]));
        let mut parts = device.room(DType::F64, [NORM_PARTS]);
        let mut out = device.room(DType::F32, [2]);
        device.kernels.run(kernels::NormAndClip {
            out: out.view_mut(),
            parts: parts.view_mut(),
            x: x.view(),
            loss: loss.view(),
            max_norm: self.max_norm,
        })?;
        device.take(&parts);
        let out = device.take(&out).values();
        Ok(vec![
            Host::new(DType::F32, [1], [out[0]]),
            Host::new(DType::F32, [1], [out[1]]),
        ])
    }

    fn expected(&self) -> Vec<Expected> {
        let [norm, factor] = self.oracle().unwrap();
        vec![
            Expected::new("norm_and_clip: norm", vec![norm], Rule::Standard),
            Expected::new("norm_and_clip: factor", vec![factor], Rule::Standard),
        ]
    }
}

/// Fewer than the parts, a block, more than a block for every part.
const SIZES: [usize; 6] = [1, 37, 4096, 5000, NORM_PARTS * 4096 + 37, 3_000_001];

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    let mut norm = |elements, entries, max_norm, loss| {
        cases.push(Box::new(NormAndClip {
            dtype,
            elements,
            entries,
            max_norm,
            loss,
        }));
    };
    for elements in SIZES {
        let factors = [None, Some(1.0), Some(1e6)];
        // The factor is made after the sum, whose size does not matter to it.
        let factors = if elements > 1_000_000 {
            &factors[1..2]
        } else {
            &factors
        };
        for max_norm in factors {
            norm(elements, Entries::Finite, *max_norm, 3.5);
        }
    }
    norm(37, Entries::Tiny, Some(1e-6), 0.0);
    for entries in [
        Entries::Overflow,
        Entries::OverflowingSquares,
        Entries::Infinite,
        Entries::Nan,
    ] {
        for (elements, max_norm) in [(37, None), (37, Some(1.0)), (9001, Some(1.0))] {
            norm(elements, entries, max_norm, 3.5);
        }
    }
    for loss in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for max_norm in [None, Some(1.0)] {
            norm(5000, Entries::Finite, max_norm, loss);
        }
    }
    for elements in SIZES {
        for start in [Start::Overwrite, Start::Accumulate] {
            cases.push(Box::new(Sum { elements, start }));
        }
    }
    cases
}
