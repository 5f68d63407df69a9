//! The loss of a policy gradient, with its gradient.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor};
use crate::host::Host;
use crate::oracle::{constant, gradients, values, variable};
use candle_core::{DType as CandleType, Result};
use kernels::KernelError;
use memory::DType;

#[derive(Debug)]
struct Policy {
    rows: usize,
    seq: usize,
    /// How far log-probabilities are apart at most.
    range: f64,
    clip: [f32; 2],
    beta: f32,
    has_reference: bool,
    by_sequence: bool,
}

/// The numbers of a token that does not count.
#[derive(Clone, Copy, PartialEq)]
enum Masked {
    Zero,
    Nan,
}

impl Policy {
    fn dims(&self) -> [usize; 2] {
        [self.rows, self.seq]
    }

    /// 0 before a row's answer and after its end; the third row has no answer at all.
    fn weights(&self) -> Host {
        let random = Host::random(DType::F32, self.dims(), 0.4, 5).values();
        let weight = |(at, random): (usize, f64)| {
            let (row, column) = (at / self.seq, at % self.seq);
            let is_masked =
                column * 5 < row * self.seq / self.rows || column > self.seq - row || row == 2;
            if is_masked { 0.0 } else { 0.5 + random }
        };
        Host::new(
            DType::F32,
            self.dims(),
            random.into_iter().enumerate().map(weight),
        )
    }

    /// Losses, what was their negative, the reference, and the advantages.
    fn tensors(&self, masked: Masked) -> [Host; 4] {
        let (dims, weights) = (self.dims(), self.weights().values());
        let random = |range: f64, seed: u64| Host::random(DType::F32, dims, range, seed).values();
        let (losses, apart) = (random(3.0, 1), random(self.range, 2));
        let near = |values: Vec<f64>| {
            losses
                .iter()
                .zip(values)
                .map(|(loss, apart)| apart - loss)
                .collect()
        };
        let of = [
            losses.clone(),
            near(apart),
            near(random(self.range, 3)),
            random(2.0, 4),
        ];
        of.map(|values: Vec<f64>| {
            let counted = values
                .into_iter()
                .zip(&weights)
                .map(|(value, weight)| match masked {
                    _ if *weight != 0.0 => value,
                    Masked::Zero => 0.0,
                    Masked::Nan => f64::NAN,
                });
            Host::new(DType::F32, dims, counted)
        })
    }

    /// The factors, and the four marks.
    fn oracle(&self) -> Result<[Vec<f64>; 5]> {
        let [losses, old, reference, advantages] = self.tensors(Masked::Zero);
        let losses = variable(&losses)?;
        let (old, reference) = (constant(&old)?, constant(&reference)?);
        let (advantages, weights) = (constant(&advantages)?, constant(&self.weights())?);
        let mut logarithms = (losses.neg()? - old)?;
        if self.by_sequence {
            let total = weights.sum_keepdim(1)?.maximum(1e-30)?;
            let mean = (logarithms * &weights)?.sum_keepdim(1)?.div(&total)?;
            logarithms = mean.broadcast_as(weights.dims())?;
        }
        let ratios = logarithms.exp()?;
        let [lowest, highest] = self.clip.map(f64::from);
        let (lowest, highest) = (1.0 - lowest, 1.0 + highest);
        let above = (ratios.gt(highest)? * advantages.gt(0.0)?)?.to_dtype(CandleType::F64)?;
        let below = (ratios.lt(lowest)? * advantages.lt(0.0)?)?.to_dtype(CandleType::F64)?;
        let is_clipped = (&above + &below)?;
        let bounds = ((above * highest)? + (below * lowest)?)?;
        let bounded = ((ratios * is_clipped.affine(-1.0, 1.0)?)? + bounds)?;
        let kl = match self.has_reference {
            true => {
                let apart = (reference + losses.as_tensor())?;
                ((apart.exp()? - apart)? - 1.0)?
            }
            false => losses.zeros_like()?,
        };
        let of_token = ((bounded * advantages)?.neg()? + (&kl * f64::from(self.beta))?)?;
        let weighed = |x: &candle_core::Tensor| values(&(x * &weights)?.sum(1)?);
        let ones = kl.ones_like()?;
        let marks = [&of_token, &kl, &is_clipped, &ones].map(weighed);
        let factors = gradients(&of_token, &weights, &[&losses])?.remove(0);
        let [loss, kl, clipped, all] = marks;
        Ok([factors, loss?, kl?, clipped?, all?])
    }
}

impl Case for Policy {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let [losses, old, reference, advantages] =
            self.tensors(Masked::Nan).map(|host| device.put(&host));
        let (reference, weights) = (
            self.has_reference.then_some(reference),
            device.put(&self.weights()),
        );
        let mut factors = device.room(DType::F32, self.dims());
        let mut marks = device.room(DType::F32, [4, self.rows]);
        device.run(kernels::PolicyGradientLoss {
            factors: factors.view_mut(),
            marks: marks.view_mut(),
            losses: losses.view(),
            old: old.view(),
            reference: reference.as_ref().map(Tensor::view),
            advantages: advantages.view(),
            weights: weights.view(),
            clip_low: self.clip[0],
            clip_high: self.clip[1],
            beta: self.beta,
            by_sequence: self.by_sequence,
        })?;
        let marks = device.take(&marks).values();
        let rows = marks.chunks(self.rows);
        let rows = rows.map(|row| Host::new(DType::F32, [self.rows], row.to_vec()));
        Ok([device.take(&factors)].into_iter().chain(rows).collect())
    }

    fn expected(&self) -> Vec<Expected> {
        let [factors, losses, kl, clipped, all] = self.oracle().unwrap();
        // The terms of a sequence's loss have either sign.
        let terms = 0.05 * self.seq as f64;
        vec![
            Expected::new("policy: factors", factors, Rule::Standard),
            Expected::new("policy: losses", losses, Rule::Standard).with_terms(terms),
            Expected::new("policy: kl", kl, Rule::Standard),
            Expected::new("policy: clipped", clipped, Rule::Standard),
            Expected::new("policy: weights", all, Rule::Standard),
        ]
    }
}

/// Rows shorter and longer than a block, ratios that are clipped and that are not.
pub fn cases(_: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (rows, seq) in [(1, 1), (4, 40), (3, 1300)] {
        for (range, clip, beta, has_reference) in [
            (1.0, [0.2, 0.28], 0.04, true),
            (1.0, [0.2, 0.2], 0.0, false),
            (0.1, [0.003, 0.004], 0.0, true),
            (2.0, [3.0, 0.1], 0.5, true),
        ] {
            for by_sequence in [false, true] {
                cases.push(Box::new(Policy {
                    rows,
                    seq,
                    range,
                    clip,
                    beta,
                    has_reference,
                    by_sequence,
                }));
            }
        }
    }
    cases
}
