//! Sums and norms over whole arenas.

use crate::case::{self, Case};
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, computing};
use crate::host::Host;
use crate::oracle::{add, constant, values};
use candle_core::Result;
use kernels::KernelError;
use memory::{DType, GRAIN_ELEMENTS, In};

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
        device.run(kernels::Sum {
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
    /// The norm's square is above every f32, the norm is not.
    OverflowingSquares,
    Infinite,
    Nan,
}

/// Grains of gradients, and what follows from them.
#[derive(Debug)]
struct Norm {
    dtype: DType,
    elements: usize,
    entries: Entries,
    max_norm: Option<f32>,
    loss: f32,
}

impl Norm {
    fn x(&self) -> Host {
        let mut values = entries(self.dtype, self.elements).values();
        // Their squares add up in f64 without rounding, in whatever order.
        let whole = |value: &mut f64| *value = (*value * 64.0).round() / 64.0;
        let mut last = |last: f64| values[self.elements / 2..].fill(last);
        match self.entries {
            Entries::Finite => values.iter_mut().for_each(whole),
            Entries::Tiny => values.iter_mut().for_each(|value| *value *= 1e-7),
            Entries::Overflow => last(3e38),
            Entries::OverflowingSquares => last(1e20),
            Entries::Infinite => last(f64::INFINITY),
            Entries::Nan => last(f64::NAN),
        }
        Host::new(self.dtype, [self.elements], values)
    }

    fn oracle(&self) -> [Vec<f64>; 3] {
        let values = self.x().values();
        let sum = |grain: &[f64]| grain.iter().map(|value| value * value).sum();
        let grains: Vec<f64> = values.chunks(GRAIN_ELEMENTS).map(sum).collect();
        let norm = grains.iter().sum::<f64>().sqrt();
        let [norm, factor] = clipped(norm, self.loss, self.max_norm);
        [grains, vec![norm], vec![factor]]
    }
}

/// The norm, infinite where no f32 holds its square, and the clipping factor.
fn clipped(norm: f64, loss: f32, max_norm: Option<f32>) -> [f64; 2] {
    let norm = if norm > f64::from(f32::MAX).sqrt() {
        f64::INFINITY
    } else {
        norm
    };
    let factor = match max_norm {
        _ if !norm.is_finite() || !loss.is_finite() => f64::NAN,
        Some(max_norm) => (f64::from(max_norm) / (norm + 1e-6)).min(1.0),
        None => 1.0,
    };
    [norm, factor]
}

/// Norm and factor of grains.
fn norm_and_clip(
    device: &Device,
    grains: In,
    loss: f32,
    max_norm: Option<f32>,
) -> std::result::Result<[Host; 2], KernelError> {
    let loss = device.put(&Host::new(DType::F32, [1], [f64::from(loss)]));
    let mut out = device.room(DType::F32, [2]);
    device.run(kernels::NormAndClip {
        out: out.view_mut(),
        grains,
        loss: loss.view(),
        max_norm,
    })?;
    let out = device.take(&out).values();
    Ok([0, 1].map(|index| Host::new(DType::F32, [1], [out[index]])))
}

impl Case for Norm {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let x = device.put(&self.x());
        let mut grains = device.room(DType::F64, [self.elements.div_ceil(GRAIN_ELEMENTS)]);
        device.run(kernels::NormGrains {
            grains: grains.view_mut(),
            x: x.view(),
        })?;
        let [norm, factor] = norm_and_clip(device, grains.view(), self.loss, self.max_norm)?;
        Ok(vec![device.take(&grains), norm, factor])
    }

    fn expected(&self) -> Vec<Expected> {
        let [grains, norm, factor] = self.oracle();
        let of_grains = match self.entries {
            Entries::Finite => Rule::Exact,
            _ => Rule::Standard,
        };
        vec![
            Expected::new("norm_grains", grains, of_grains),
            Expected::new("norm_and_clip: norm", norm, Rule::Standard),
            Expected::new("norm_and_clip: factor", factor, Rule::Standard),
        ]
    }
}

/// The norm of grains that were made elsewhere.
#[derive(Debug)]
struct NormAndClip {
    grains: usize,
    max_norm: Option<f32>,
}

impl NormAndClip {
    fn grains(&self) -> Host {
        let grains = Host::random(DType::F64, [self.grains], 1.0, 2).values();
        Host::new(
            DType::F64,
            [self.grains],
            grains.iter().map(|grain| grain.abs()),
        )
    }
}

impl Case for NormAndClip {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let grains = device.put(&self.grains());
        Ok(norm_and_clip(device, grains.view(), 3.5, self.max_norm)?.into())
    }

    fn expected(&self) -> Vec<Expected> {
        let norm = self.grains().values().iter().sum::<f64>().sqrt();
        let [norm, factor] = clipped(norm, 3.5, self.max_norm);
        vec![
            Expected::new("norm_and_clip: norm", vec![norm], Rule::Standard),
            Expected::new("norm_and_clip: factor", vec![factor], Rule::Standard),
        ]
    }
}

/// Part of a grain, one, more than one; more than there are lanes to sum their sums.
const SIZES: [usize; 6] = [1, 37, 4096, 5000, 100_003, 4_300_001];

/// None, as where gradients are released; fewer than there are lanes, as many, more.
const GRAINS: [usize; 6] = [0, 1, 1023, 1024, 1025, 30_011];

fn norm_cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    let mut norm = |elements, entries, max_norm, loss| {
        cases.push(Box::new(Norm {
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
    for elements in [37, 9001] {
        norm(elements, Entries::Tiny, Some(1e-6), 0.0);
    }
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
    for grains in GRAINS {
        for max_norm in [None, Some(1.0)] {
            cases.push(Box::new(NormAndClip { grains, max_norm }));
        }
    }
    cases
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases = norm_cases(dtype);
    for elements in SIZES {
        for start in [Start::Overwrite, Start::Accumulate] {
            cases.push(Box::new(Sum { elements, start }));
        }
    }
    cases
}

/// Grains and norms are sums in one order everywhere.
#[test]
fn norms_have_the_same_bits_everywhere() {
    for dtype in crate::DTYPES {
        let devices = computing(dtype);
        let [reference, others @ ..] = devices.as_slice() else {
            panic!("two implementations or more");
        };
        assert!(!others.is_empty(), "two implementations or more");
        for case in norm_cases(dtype) {
            let expected = case::run(case.as_ref(), reference);
            for device in others {
                for (got, expected) in case::run(case.as_ref(), device).iter().zip(&expected) {
                    let exact = Expected::new("norm", expected.values(), Rule::Exact);
                    let judged = exact.judge(got, device.kernels.target());
                    judged
                        .unwrap_or_else(|message| panic!("{case:?} on {}: {message}", device.name));
                }
            }
        }
    }
}

/// A grain does not depend on what comes before or after it, nor on where it lies.
#[test]
fn grains_are_the_same_in_pieces() {
    const ELEMENTS: usize = 5 * GRAIN_ELEMENTS + 17;
    for dtype in crate::DTYPES {
        for device in computing(dtype) {
            let x = device.put(&Host::random(dtype, [ELEMENTS], 1.0, 3));
            let grains = |cut: usize| {
                let mut grains = device.room(DType::F64, [6]);
                for (range, own) in [
                    (0..cut, 0..cut / GRAIN_ELEMENTS),
                    (cut..ELEMENTS, cut / GRAIN_ELEMENTS..6),
                ] {
                    let operation = kernels::NormGrains {
                        grains: grains.view_mut().rows(own),
                        x: x.view().rows(range),
                    };
                    device.run(operation).unwrap();
                }
                device.take(&grains)
            };
            for cut in 1..6 {
                assert_eq!(grains(cut * GRAIN_ELEMENTS), grains(0), "{}", device.name);
            }
        }
    }
}
