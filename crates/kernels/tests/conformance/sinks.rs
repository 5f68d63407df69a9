//! Sinks of attention: what a case says of them, what a device has of them, and what is expected.

use crate::attention::Attention;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Start, Tensor};
use crate::host::Host;
use crate::oracle::{add, softmax, variable};
use candle_core::{Result, Tensor as CandleTensor, Var};
use kernels::{AttentionShape, Init};
use memory::{DType, In, Out};

/// Numbers far below this are zero.
const LEAST: f64 = 1e-30;

/// The sinks of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sinks {
    /// They are around this.
    pub around: f64,
    /// The type of their gradient, and how it starts; none of frozen ones.
    pub gradient: Option<(DType, Start)>,
}

/// Sinks on a device, and the tensor that their gradient is written to.
pub struct PlacedSinks {
    sinks: Tensor,
    gradient: Option<(Tensor, Start)>,
}

impl Sinks {
    /// Among scores, above and below all, so far that one or the other vanishes, and frozen: with every type and start of a gradient.
    pub const EVERY: [Sinks; 6] = [
        Sinks::learning(0.0, DType::F32, Start::Overwrite),
        Sinks::learning(0.5, DType::BF16, Start::Accumulate),
        Sinks::learning(20.0, DType::F32, Start::Accumulate),
        Sinks::learning(300.0, DType::F32, Start::Overwrite),
        Sinks::learning(-300.0, DType::BF16, Start::Overwrite),
        Sinks {
            around: 1.0,
            gradient: None,
        },
    ];

    pub const fn learning(around: f64, dtype: DType, start: Start) -> Sinks {
        Sinks {
            around,
            gradient: Some((dtype, start)),
        }
    }

    pub fn host(&self, dtype: DType, heads: usize) -> Host {
        let apart = Host::random(DType::F64, [heads], 1.5, 5).values();
        Host::new(dtype, [heads], apart.into_iter().map(|x| self.around + x))
    }

    /// What the gradient's memory holds before.
    fn before(dtype: DType, heads: usize) -> Host {
        Host::random(dtype, [heads], 1.0, 6)
    }

    pub fn put(&self, dtype: DType, heads: usize, device: &Device) -> PlacedSinks {
        let start = |(dtype, start)| {
            let before = Sinks::before(dtype, heads);
            (device.start(start, &before), start)
        };
        PlacedSinks {
            sinks: device.put(&self.host(dtype, heads)),
            gradient: self.gradient.map(start),
        }
    }
}

/// The sinks that are placed.
pub fn view(placed: &Option<PlacedSinks>) -> Option<In<'_>> {
    placed.as_ref().map(|placed| placed.sinks.view())
}

impl PlacedSinks {
    /// The sinks, and their gradient with how it starts.
    pub fn parts(&mut self) -> (In<'_>, Option<(Out<'_>, Init<'_>)>) {
        let gradient = self.gradient.as_mut().map(|(tensor, start)| {
            let init = match start {
                Start::Accumulate => Init::Accumulate,
                Start::Overwrite | Start::Add => Init::Overwrite,
            };
            (tensor.view_mut(), init)
        });
        (self.sinks.view(), gradient)
    }

    pub fn take_gradient(&self, device: &Device) -> Option<Host> {
        let gradient = self.gradient.as_ref();
        gradient.map(|(tensor, _)| device.take(tensor))
    }
}

impl Attention {
    pub fn place_sinks(&self, device: &Device) -> Option<PlacedSinks> {
        let sinks = self.sinks.as_ref();
        sinks.map(|sinks| sinks.put(self.dtype, self.shape.heads, device))
    }

    pub fn sinks_variable(&self) -> Result<Option<Var>> {
        let sinks = self.sinks.as_ref();
        let put = |sinks: &Sinks| variable(&sinks.host(self.dtype, self.shape.heads));
        sinks.map(put).transpose()
    }

    /// Probabilities of the keys, and the logarithm of each row's sum, `[b, heads, s, 1]`, from masked scores.
    pub fn probabilities(
        &self,
        scores: &CandleTensor,
        sinks: Option<&Var>,
    ) -> Result<[CandleTensor; 2]> {
        let AttentionShape {
            batch, seq, heads, ..
        } = self.shape;
        let all = match sinks {
            Some(sinks) => {
                let of_rows = sinks
                    .reshape((1, heads, 1, 1))?
                    .broadcast_as((batch, heads, seq, 1))?;
                CandleTensor::cat(&[scores, &of_rows], 3)?
            }
            None => scores.clone(),
        };
        let largest = all.max_keepdim(3)?;
        let sums = all.broadcast_sub(&largest)?.exp()?.sum_keepdim(3)?;
        let lse = (sums.log()? + largest)?;
        Ok([softmax(&all)?.narrow(3, 0, seq)?, lse])
    }

    /// What is expected of the gradient of sinks, of which the oracle has what is added.
    pub fn expected_dsinks(
        &self,
        name: &'static str,
        lse: &[f64],
        gradient: Vec<f64>,
    ) -> Option<Expected> {
        let (dtype, start) = self.sinks?.gradient?;
        let before = Sinks::before(dtype, self.shape.heads);
        let values = add(gradient, &start.values(&before));
        Some(Expected::new(
            name,
            values,
            Rule::Within(self.sink_tolerance(lse)),
        ))
    }

    /// What is expected where a sink may be so far from scores that their exponentials, or its own, are below the least f32.
    pub fn allowing_underflow(&self, expected: Vec<Expected>) -> Vec<Expected> {
        match self.sinks {
            Some(sinks) if sinks.around.abs() > 80.0 => {
                let expected = expected.into_iter();
                expected.map(|each| each.with_terms(LEAST)).collect()
            }
            _ => expected,
        }
    }

    /// A row's term is e^(sink - lse) times a product of dout and rounded outputs, or probabilities. Roundings have random signs: those of
    /// a sum add up to the root of the sum of squares.
    fn sink_tolerance(&self, lse: &[f64]) -> f64 {
        let AttentionShape {
            batch,
            seq,
            heads,
            v_head_dim,
            ..
        } = self.shape;
        let sinks = self.sinks.map(|sinks| sinks.host(self.dtype, heads));
        let (sinks, dout) = (sinks.unwrap().values(), self.dout().values());
        let of_head = |head: usize| {
            let rows = (0..batch * seq).map(|token| {
                let row = (token / seq * heads + head) * seq + token % seq;
                let own = &dout[(token * heads + head) * v_head_dim..][..v_head_dim];
                let squares: f64 = own.iter().map(|x| x * x).sum();
                (2.0 * (sinks[head] - lse[row])).exp() * squares
            });
            rows.sum::<f64>().sqrt()
        };
        let kept = self
            .dropout
            .map_or(1.0, |of| 1.0 - f64::from(of.probability));
        let rounding = match self.dtype {
            DType::F32 => 2e-6,
            _ => 1.0 / 512.0,
        };
        let largest = (0..heads).map(of_head).fold(0.0, f64::max);
        (rounding * largest / kept).max(LEAST)
    }
}
