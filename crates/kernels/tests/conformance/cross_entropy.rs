//! Cross-entropy with its gradient in place of the logits, and the cap of logits.

use crate::case::Case;
use crate::compare::{Expected, Rule};
use crate::device::{Device, Tensor};
use crate::host::Host;
use crate::oracle::{constant, gradients, values, variable};
use candle_core::{DType as CandleType, Result};
use kernels::KernelError;
use memory::DType;

#[derive(Clone, Copy, Debug)]
enum Masked {
    None,
    /// Every third token.
    Some,
    All,
}

#[derive(Debug)]
struct CrossEntropy {
    dtype: DType,
    tokens: usize,
    vocabulary: usize,
    /// Largest of the logits' entries.
    range: f64,
    masked: Masked,
    scale: Option<f32>,
    /// Each token's own factor is the scale times one that differs.
    has_scales: bool,
    cap: Option<f32>,
}

impl CrossEntropy {
    fn logits(&self) -> Host {
        Host::random(self.dtype, [self.tokens, self.vocabulary], self.range, 1)
    }

    /// The factor on each token's gradient.
    fn scales(&self) -> Host {
        let scale = f64::from(self.scale.unwrap_or(1.0));
        let of_token = |token: usize| match self.has_scales {
            true => scale * (token as f64 - 2.0),
            false => scale,
        };
        Host::new(DType::F32, [self.tokens], (0..self.tokens).map(of_token))
    }

    fn is_masked(&self, token: usize) -> bool {
        match self.masked {
            Masked::None => false,
            Masked::Some => token % 3 == 1,
            Masked::All => true,
        }
    }

    /// Ids, where masked with a negative number instead.
    fn targets(&self) -> Host {
        let ids = Host::random_ids(self.tokens, self.vocabulary, 2).values();
        let negative = [-1.0, -100.0];
        let target = |(token, id)| {
            if self.is_masked(token) {
                negative[token % 2]
            } else {
                id
            }
        };
        Host::new(
            DType::I32,
            [self.tokens],
            ids.into_iter().enumerate().map(target),
        )
    }

    /// The gradient without the targets, whose entries dwarf the others.
    fn others(&self, mut gradient: Vec<f64>) -> Vec<f64> {
        let rows = gradient.chunks_mut(self.vocabulary);
        for (row, target) in rows.zip(self.targets().values()) {
            if target >= 0.0 {
                row[target as usize] = 0.0;
            }
        }
        gradient
    }

    fn oracle(&self) -> Result<[Vec<f64>; 2]> {
        let given = variable(&self.logits())?;
        let logits = match self.cap {
            Some(cap) => capped(&given, cap)?,
            None => given.as_tensor().clone(),
        };
        let targets = constant(&self.targets())?.unsqueeze(1)?;
        let counted = targets.ge(0.0)?.to_dtype(CandleType::F64)?;
        let ids = targets.maximum(0.0)?.to_dtype(CandleType::U32)?;
        let largest = logits.max_keepdim(1)?.detach();
        let sums = logits.broadcast_sub(&largest)?.exp()?.sum_keepdim(1)?;
        let losses = ((sums.log()? + largest)? - logits.gather(&ids, 1)?)?.mul(&counted)?;
        let scales = constant(&self.scales())?.unsqueeze(1)?;
        let mut found = gradients(&losses, &scales, &[&given])?;
        Ok([values(&losses)?, found.remove(0)])
    }
}

impl Case for CrossEntropy {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let (mut logits, targets) = (device.put(&self.logits()), device.put(&self.targets()));
        let scale = self.scale.map(|scale| match self.has_scales {
            true => device.put(&self.scales()),
            false => device.put(&Host::new(DType::F32, [1], [f64::from(scale)])),
        });
        let mut losses = device.room(DType::F32, [self.tokens]);
        device.run(kernels::CrossEntropy {
            losses: losses.view_mut(),
            logits: logits.view_mut(),
            targets: targets.view(),
            scale: scale.as_ref().map(Tensor::view),
            cap: self.cap,
        })?;
        let gradient = device.take(&logits);
        let others = Host::new(self.dtype, gradient.dims, self.others(gradient.values()));
        Ok(vec![device.take(&losses), gradient, others])
    }

    fn expected(&self) -> Vec<Expected> {
        let [losses, dlogits] = self.oracle().unwrap();
        let others = self.others(dlogits.clone());
        // Where a cap is reached, its slope is 1 less what is nearly 1.
        let scales = self.scales().values().into_iter().map(f64::abs);
        let terms = self.cap.map_or(0.0, |_| scales.fold(0.0, f64::max));
        vec![
            Expected::new("cross_entropy: losses", losses, Rule::Standard),
            Expected::new("cross_entropy: gradient", dlogits, Rule::Standard).with_terms(terms),
            Expected::new(
                "cross_entropy: gradient beside the targets",
                others,
                Rule::Standard,
            )
            .with_terms(terms),
        ]
    }
}

/// cap tanh(x / cap), in f64.
fn capped(x: &candle_core::Tensor, cap: f32) -> Result<candle_core::Tensor> {
    let cap = f64::from(cap);
    (x / cap)?.tanh()? * cap
}

#[derive(Debug)]
struct SoftCap {
    dtype: DType,
    elements: usize,
    range: f64,
}

impl SoftCap {
    const CAP: f32 = 30.0;

    fn x(&self) -> Host {
        Host::random(self.dtype, [self.elements], self.range, 1)
    }
}

impl Case for SoftCap {
    fn run(&self, device: &Device) -> std::result::Result<Vec<Host>, KernelError> {
        let mut x = device.put(&self.x());
        device.run(kernels::SoftCap {
            x: x.view_mut(),
            cap: SoftCap::CAP,
        })?;
        Ok(vec![device.take(&x)])
    }

    fn expected(&self) -> Vec<Expected> {
        let x = constant(&self.x()).unwrap();
        let y = values(&capped(&x, SoftCap::CAP).unwrap()).unwrap();
        vec![Expected::new("soft_cap", y, Rule::Standard)]
    }
}

pub fn cases(dtype: DType) -> Vec<Box<dyn Case>> {
    let mut cases: Vec<Box<dyn Case>> = Vec::new();
    for (tokens, vocabulary) in [(1, 131), (37, 131), (37, 2), (5, 33_000)] {
        let mean = Some(1.0 / tokens as f32);
        for (range, masked, scale, has_scales, cap) in [
            (4.0, Masked::None, mean, false, None),
            (1000.0, Masked::Some, mean, false, None),
            (4.0, Masked::Some, mean, false, None),
            (4.0, Masked::All, mean, false, None),
            (4.0, Masked::Some, None, false, None),
            (4.0, Masked::Some, mean, false, Some(3.0)),
            (1000.0, Masked::Some, None, false, Some(30.0)),
            (4.0, Masked::Some, mean, true, None),
            (4.0, Masked::None, mean, true, Some(3.0)),
        ] {
            cases.push(Box::new(CrossEntropy {
                dtype,
                tokens,
                vocabulary,
                range,
                masked,
                scale,
                has_scales,
                cap,
            }));
        }
    }
    for (elements, range) in [(1, 2.0), (131, 2.0), (40_000, 200.0)] {
        cases.push(Box::new(SoftCap {
            dtype,
            elements,
            range,
        }));
    }
    cases
}
